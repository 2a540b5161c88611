"""What a compiled program says of itself: launches, bytes, products, loops, copies.

It reads the text of XLA's final program, in which an instruction is a launch on a GPU.
Bytes are those of operands and results; of an operand that a fusion only slices, and of
a result that it updates in place, those of the slice. Caches are not in it.
"""

import collections
import dataclasses
import math
import re

BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}
FREE |= {"fusion-done", "copy-done", "async-done"}
CALLS = ("call", "conditional", "async-start")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(")
_LINE = re.compile(
  r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, (.*))?$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: result type, operation, names of its operands, and the rest."""

  name: str
  type: str
  operation: str
  operands: tuple[str, ...]
  rest: str

  def called(self, kind):
    """Name of a computation that it calls."""
    found = re.search(rf"\b{kind}=%([\w.\-]+)", self.rest)
    return found and found[1]


def arrays(type_):
  """(dtype, sizes) of a type, without the workspace of a library's product."""
  found = [
    (dtype, tuple(int(n) for n in sizes.split(",") if n))
    for dtype, sizes in _ARRAY.findall(type_)
  ]
  return found[:1] if len(found) == 2 and found[1][0] == "s8" else found


def nbytes(found):
  """Bytes of arrays."""
  bits = lambda dtype: BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
  return sum(math.prod(sizes) * bits(dtype) // 8 for dtype, sizes in found)


class Program:
  """The computations of a program, by name."""

  def __init__(self, text):
    self.computations, self.entry, current = {}, None, None
    for line in text.splitlines():
      if head := _HEAD.match(line):
        current = self.computations.setdefault(head[2], {})
        self.entry = head[2] if head[1] else self.entry
      elif (found := _LINE.match(line)) and current is not None:
        name, type_, operation, operands, rest = found.groups()
        names = tuple(re.findall(r"%([\w.\-]+)", operands))
        one = Instruction(name, type_, operation, names, rest or "")
        # A parameter's operand is its number.
        is_parameter = operation == "parameter"
        current[name] = dataclasses.replace(one, rest=operands) if is_parameter else one

  def loops(self):
    """Loops of the program, and of each how often it turns, or None."""
    for body in self.computations.values():
      for one in body.values():
        if one.operation == "while":
          turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', one.rest)
          yield one, int(turns[1]) if turns else None

  def waiting(self):
    """Names of the loops whose number of turns only the device knows."""
    return [one.name for one, turns in self.loops() if turns is None]

  def copies(self, weights):
    """Instructions other than products that rewrite a whole weight.

    `weights` are (dtype, sizes) of those arguments.
    """
    found = []
    for name, body in self.launched():
      for one in body.values():
        if one.operation in (*FREE, *CALLS, "custom-call", "while"):
          continue
        read = {array for n in one.operands for array in self.of(body, n)}
        made = self.results(body, one)
        size = max((math.prod(sizes) for _, sizes in made), default=0)
        if any(math.prod(array[1]) <= size for array in read & weights):
          found.append(f"{name}: {one.name} = {one.type}")
    return found

  @staticmethod
  def of(body, name):
    """Arrays of an operand of some size, by its type."""
    one = body.get(name)
    return arrays(one.type) if one and one.operation != "tuple" else []

  def launched(self):
    """Computations that are no inside of a fusion, reduction or condition."""
    waiting, seen = [self.entry], set()
    while waiting:
      name = waiting.pop()
      if name in seen:
        continue
      seen.add(name)
      yield name, self.computations[name]
      for one in self.computations[name].values():
        waiting += self.callees(one)

  def callees(self, one):
    """Computations that a loop, a call or a choice runs."""
    if one.operation == "while":
      return [one.called("body")]
    if one.operation not in CALLS:
      return []
    lists = r"(?:branch_computations|called_computations)=\{(.*?)\}"
    listed = re.search(lists, one.rest)
    names = re.findall(r"%([\w.\-]+)", listed[1]) if listed else []
    kinds = ("to_apply", "calls", "true_computation", "false_computation")
    return names + [name for name in map(one.called, kinds) if name]

  def counts(self):
    """Launches, bytes, and multiplications and additions of products by dtype."""
    total = collections.Counter()
    self._visit(self.entry, 1, total)
    return dict(total)

  def _visit(self, name, times, total):
    body, turns = self.computations[name], dict(self._turns())
    for one in body.values():
      if one.operation == "while":
        self._visit(one.called("body"), times * (turns[one.name] or 1), total)
      elif one.operation in CALLS:
        for callee in self.callees(one):
          self._visit(callee, times, total)
      elif one.operation not in FREE:
        total["launches"] += times
        total["bytes"] += times * self._moved(body, one)
        for dtype, operations in self._products(body, one):
          total[f"{dtype} operations of products"] += times * operations

  def _turns(self):
    return ((one.name, turns) for one, turns in self.loops())

  def _moved(self, body, one):
    inside = self.computations.get(one.called("calls") or "", {})
    parameters = {
      int(i.rest): n for n, i in inside.items() if i.operation == "parameter"
    }
    moved = 0
    for place, name in enumerate(one.operands):
      whole = nbytes(arrays(body[name].type)) if name in body else 0
      users = [i for i in inside.values() if parameters.get(place) in i.operands]
      slices = ("dynamic-slice", "slice", "gather", "dynamic-update-slice")
      if users and all(user.operation in slices for user in users):
        sizes = [
          0 if user.operation == slices[3] else nbytes(arrays(user.type))
          for user in users
        ]
        whole = min(whole, sum(sizes))
      moved += whole
    updates = [i for i in inside.values() if i.operation == "dynamic-update-slice"]
    results = self.results(body, one)
    if updates and len(results) == 1:
      of_update = (arrays(inside[i.operands[1]].type) for i in updates)
      return moved + sum(map(nbytes, of_update))
    return moved + nbytes(results)

  @staticmethod
  def results(body, one):
    """Arrays that an instruction makes; the start of one repeats its operands."""
    found = arrays(one.type)
    if not one.operation.endswith("-start"):
      return found
    named = [arrays(body[name].type) for name in one.operands if name in body]
    return found[sum(map(len, named)) : -1]

  def _products(self, body, one):
    inside = self.computations.get(one.called("calls") or "", {}).values()
    for each, around in [(one, body), *((i, None) for i in inside)]:
      is_library = re.search(r'target="__cublas\$(lt\$)?(matmul|gemm)', each.rest)
      if each.operation != "dot" and not is_library:
        continue
      around = around or self.computations[one.called("calls")]
      [(dtype, sizes)] = arrays(around[each.operands[0]].type)[:1]
      pattern = r'lhs_contracting_(?:dims=\{|dimensions":\[)([\d",]*)'
      places = re.findall(r"\d+", re.search(pattern, each.rest)[1])
      summed = math.prod(sizes[int(place)] for place in places)
      yield dtype, 2 * summed * math.prod(arrays(each.type)[0][1])
