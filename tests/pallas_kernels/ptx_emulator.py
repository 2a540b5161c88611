"""Executes a compiled kernel's PTX on arrays: a GPU's meaning, without one.

The threads of a block run in step as lanes of numpy arrays, blocks one after the other.
Branches must be the same for all threads of a block, which they are in what Triton
makes. Every address is checked against the arrays that the kernel was given. What only
orders memory (barriers, fences, waits) does nothing here, so a missing barrier is not
found; and approximate functions are exact to rounding, where a GPU's are to two units.

Tensor cores add exact products in float64 and round once.
"""

import re

import numpy as np

from tests.pallas_kernels.ptx_machine import BF16, UNSIGNED, evaluate, floats, typed

SHARED_BYTES = 232448
"""Of a multiprocessor, for one block."""
_GAP = 4096
"""Bytes between arrays, which no address may hit."""
_BASE = 1 << 40
_WIDTH = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_ORDER = ("bar", "fence", "griddepcontrol", "membar")
_WAIT = (
  "cp.async.commit",
  "cp.async.wait",
  "wgmma.fence",
  "wgmma.commit",
  "wgmma.wait",
)


class Memory:
  """Bytes from an address on; those that do not exist are an error to touch."""

  def __init__(self, size, base, fill, exists):
    self.base = base
    self.bytes = np.full(size, fill, np.uint8)
    self.exists = np.full(size, exists)

  def place(self, address, size, is_on):
    """Indices `[threads, size]` of bytes; those of threads that are off are 0."""
    index = np.where(is_on, address - np.uint64(self.base), 0).astype(np.int64)
    index = index[:, None] + np.arange(size)
    inside = (index >= 0) & (index < len(self.bytes))
    if not (inside & self.exists[np.where(inside, index, 0)])[is_on].all():
      raise IndexError("an address outside of the kernel's arrays or shared memory")
    if (index[is_on, 0] % size).any():
      raise IndexError(f"an address that is not aligned to {size} bytes")
    return index


class Arrays(Memory):
  """The arrays of a launch, one after the other, with gaps between them."""

  def __init__(self, arrays):
    """Copies the arrays in; `addresses` says where."""
    self.addresses, end = [], _GAP
    for array in arrays:
      self.addresses.append(_BASE + end)
      end += -(-array.nbytes // 256) * 256 + _GAP
    super().__init__(end, _BASE, 0, exists=False)
    self.spans = []
    for array, address in zip(arrays, self.addresses, strict=True):
      first = address - _BASE
      self.spans.append((slice(first, first + array.nbytes), array))
      self.bytes[self.spans[-1][0]] = np.ascontiguousarray(array).view(np.uint8).ravel()
      self.exists[self.spans[-1][0]] = True

  def array(self, index):
    span, like = self.spans[index]
    return self.bytes[span].copy().view(like.dtype).reshape(like.shape)


def parse(ptx):
  """Instructions (predicate, operation, operands), places of labels, threads."""
  # Triton's kernels and Mosaic's.
  size = re.search(r"\.(?:reqntid|maxntid) (\d+)", ptx)
  body = ptx[ptx.index("{\n", size.end()) + 2 : ptx.rindex("}")]
  body = re.sub(r"//[^\n]*|^\s*\.loc\s[^\n]*", "", body, flags=re.MULTILINE)
  threads = int(size[1])
  code, labels = [], {}
  for statement in body.split(";"):
    text = " ".join(statement.split())
    while match := re.match(r"(\$?[\w$]+): ?|[{}] ?", text):
      if match[1]:
        labels[match[1]] = len(code)
      text = text[match.end() :]
    if not text or text.startswith("."):
      continue
    predicate = None
    if match := re.match(r"@(!?)(%p\d+) ", text):
      predicate, text = (match[2], bool(match[1])), text[match.end() :]
    operation, _, rest = text.partition(" ")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    code.append((predicate, operation, operands))
  return code, labels, threads


class Block:
  def __init__(self, program, memory, place):
    self.code, self.labels, self.threads = program
    self.memory, self.place = memory, place
    # Of NaN, whatever is read as.
    self.shared = Memory(SHARED_BYTES, 0, 0xFF, exists=True)
    self.registers = {}

  def value(self, name, size):
    """A source operand, `[threads]`, of `size` bits if it is a number."""
    if name in self.registers:
      return self.registers[name]
    if name == "%tid.x":
      return np.arange(self.threads, dtype=np.uint32)
    if name.startswith("%ctaid"):
      return np.full(self.threads, self.place["xyz".index(name[-1])], np.uint32)
    if name.startswith("%"):
      # Read before it was written: all ones, whatever is made of them.
      number = -1
    elif name == "global_smem":
      number = 0
    elif name.startswith("0f"):
      number = int(name[2:], 16)
    else:
      number = int(name.rstrip("U"), 0)
    if size == 1:
      return np.full(self.threads, number != 0)
    return np.full(self.threads, number & ((1 << size) - 1), UNSIGNED[size])

  def write(self, name, value, is_on):
    value = np.broadcast_to(value, (self.threads,))
    if kind := re.match(r"%(p|rs|rd|r)\d", name):
      value = value.astype(_WIDTH[kind[1]])
    if not is_on.all() and name in self.registers:
      value = np.where(is_on, value, self.registers[name])
    self.registers[name] = value

  def address(self, text):
    match = re.match(r"\[ ?([%\w]+) ?(?:\+ ?(-?\d+))? ?\]", text)
    base = self.value(match[1], 64).astype(np.uint64)
    return base + np.uint64(int(match[2] or 0) & (2**64 - 1))

  def names(self, text):
    return [n.strip() for n in text.strip("{} ").split(",")]

  def run(self):
    at = 0
    while at < len(self.code):
      predicate, operation, operands = self.code[at]
      at += 1
      is_on = np.ones(self.threads, bool)
      if predicate:
        is_on = self.registers[predicate[0]] ^ predicate[1]
      if operation in ("bra", "bra.uni"):
        if is_on.any() != is_on.all():
          raise NotImplementedError("a branch that threads of a block do not share")
        at = self.labels[operands[0]] if is_on.all() else at
      elif operation in ("ret", "exit"):
        return
      elif not operation.startswith(_ORDER + _WAIT):
        self.step(operation, operands, is_on)

  def step(self, operation, operands, is_on):
    name, *rest = operation.split(".")
    match name:
      case "ld" if rest[0].startswith("param"):
        index = int(re.search(r"_param_(\d+)", operands[1])[1])
        address = np.full(self.threads, self.memory.addresses[index], np.uint64)
        self.write(operands[0], address, is_on)
      case "cvta":
        self.write(operands[0], self.value(operands[1], 64), is_on)
      case "ld" | "st":
        self.move(name, rest, operands, is_on)
      case "cp":
        self.copy(operands, is_on)
      case "ldmatrix" | "stmatrix":
        self.matrices(name == "ldmatrix", "trans" in rest, operands)
      case "mma":
        self.mma(*map(self.names, operands))
      case "wgmma":
        self.wgmma(int(re.search(r"m64n(\d+)k16", operation)[1]), operands)
      case "shfl":
        lane = np.arange(self.threads)
        other = self.value(operands[2], 32).astype(int)
        warp = lane & ~31
        source = lane ^ other if rest[1] == "bfly" else warp + (other & 31)
        self.write(operands[0], self.value(operands[1], 32)[source], is_on)
      case "elect":
        lane = np.arange(self.threads, dtype=np.uint32) & 31
        for register, value in zip(operands[0].split("|"), (0, lane == 0), strict=True):
          self.write(register, value, is_on)
      case "redux":
        value = typed(self.value(operands[1], 32), rest[-1]).reshape(-1, 32)
        best = {"max": np.max, "min": np.min}[rest[1]](value, axis=1)
        self.write(operands[0], np.repeat(best, 32).view(np.uint32), is_on)
      case "mov" if operands[0].startswith("{"):
        value, parts = self.value(operands[1], 32), self.names(operands[0])
        for i, part in enumerate(parts):
          half = value >> np.uint32(16 * i)
          self.write(part, half.astype(np.uint16), is_on)
      case "mov" if operands[1].startswith("{"):
        halves = [self.value(n, 16) for n in self.names(operands[1])]
        self.write(operands[0], evaluate(operation, halves), is_on)
      case _:
        size = 1 if rest[-1] == "pred" else int(re.search(r"\d+", rest[-1])[0])
        sizes = [32 if rest[-1].endswith("x2") else size] * 3
        if name in ("shl", "shr"):
          sizes[1] = 32
        elif name == "selp":
          sizes[2] = 1
        sources = [self.value(*pair) for pair in zip(operands[1:], sizes, strict=False)]
        self.write(operands[0], evaluate(operation, sources), is_on)

  def move(self, name, rest, operands, is_on):
    memory = self.memory if "global" in rest else self.shared
    size = int(rest[-1][1:]) // 8
    where, registers = operands if name == "st" else operands[::-1]
    registers = self.names(registers)
    index = memory.place(self.address(where), size * len(registers), is_on)
    for i, register in enumerate(registers):
      part = index[:, i * size : (i + 1) * size]
      if name == "ld":
        value = np.ascontiguousarray(memory.bytes[part])
        self.write(register, value.view(UNSIGNED[8 * size])[:, 0], is_on)
      else:
        value = self.value(register, 8 * size).astype(UNSIGNED[8 * size])
        memory.bytes[part[is_on]] = value[is_on].view(np.uint8).reshape(-1, size)

  def copy(self, operands, is_on):
    """From global to shared memory at once, zeros behind what is taken."""
    target, source, size, *taken = operands
    size = int(size, 0)
    count = self.value(taken[0], 32) if taken else np.full(self.threads, size)
    if not np.isin(count, (0, size)).all():
      raise NotImplementedError("a copy of a part")
    is_taken = is_on & (count > 0)
    index = self.memory.place(self.address(source), size, is_taken)
    data = np.where(is_taken[:, None], self.memory.bytes[index], 0)
    place = self.shared.place(self.address(target), size, is_on)
    self.shared.bytes[place[is_on]] = data[is_on]

  def matrices(self, is_load, is_transposed, operands):
    """8 x 8 matrices of 16 bits between shared memory and fragments."""
    where, registers = operands[::-1] if is_load else operands
    registers, address = self.names(registers), self.address(where)
    lane = np.arange(32)
    row, column = lane // 4, 2 * (lane % 4)
    for warp in range(self.threads // 32):
      here = slice(32 * warp, 32 * warp + 32)
      for i, register in enumerate(registers):
        rows = address[here][8 * i : 8 * i + 8]
        place = self.shared.place(rows, 16, np.ones(8, bool))
        matrix = self.shared.bytes[place].view(np.uint16)
        matrix = matrix.T.copy() if is_transposed else matrix
        if is_load:
          pair = matrix[row, column].astype(np.uint32)
          pair |= matrix[row, column + 1].astype(np.uint32) << np.uint32(16)
          old = self.registers.get(register, np.zeros(self.threads, np.uint32)).copy()
          old[here] = pair
          self.registers[register] = old
        else:
          value = self.value(register, 32)[here]
          matrix[row, column] = value.astype(np.uint16)
          matrix[row, column + 1] = (value >> np.uint32(16)).astype(np.uint16)
          matrix = matrix.T.copy() if is_transposed else matrix
          self.shared.bytes[place] = np.ascontiguousarray(matrix).view(np.uint8)

  def fragment(self, registers):
    """Pairs of bfloat16 of each register, float64 `[threads, registers, 2]`."""
    value = np.stack([self.value(n, 32) for n in registers], 1)
    return value.view(np.uint16).view(BF16).astype(np.float64).reshape(*value.shape, 2)

  def left(self, registers):
    """The left operand of all warps, `[warps, 16, 16]`, from four registers."""
    lane = np.arange(32)
    pairs = self.fragment(registers).reshape(-1, 32, 4, 2)
    a = np.zeros((len(pairs), 16, 16))
    for i in range(4):
      row, column = lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
      for half in range(2):
        a[:, row, column + half] = pairs[:, :, i, half]
    return a

  def add_product(self, registers, product, old):
    """Writes `[warps, 16, n]`, added to the old registers, rounded to float32."""
    lane = np.arange(32)
    for i, register in enumerate(registers):
      row = lane // 4 + 8 * (i % 4 // 2)
      column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
      total = product[:, row, column].reshape(-1)
      if old is not None:
        total = total + floats(self.value(old[i], 32), np.float32).astype(np.float64)
      self.registers[register] = total.astype(np.float32).view(np.uint32)

  def mma(self, out, a, b, c):
    lane = np.arange(32)
    pairs = self.fragment(b).reshape(-1, 32, 2, 2)
    right = np.zeros((len(pairs), 16, 8))
    for i in range(2):
      for half in range(2):
        right[:, 2 * (lane % 4) + 8 * i + half, lane // 4] = pairs[:, :, i, half]
    self.add_product(out, self.left(a) @ right, c)

  def tile(self, descriptor, rows, is_transposed=False):
    """A tile `[rows, 16]` of bfloat16 in shared memory.

    Contiguous there are columns of a row, or rows of a column if it is transposed.
    """
    if (descriptor != descriptor[0]).any():
      raise NotImplementedError("a descriptor that threads do not share")
    word = int(descriptor[0])
    first, leading, stride = (((word >> n) & 0x3FFF) << 4 for n in (0, 16, 32))
    width = {0: 16, 1: 128, 2: 64, 3: 32}[word >> 62]
    row, column = np.arange(rows)[:, None], 2 * np.arange(16)[None, :]
    if is_transposed:
      if width == 16:
        raise NotImplementedError("a transposed tile that is not swizzled")
      side = width // 2
      address = first + row // side * leading + 2 * (row % side)
      address = address + column // 16 * stride + column % 16 // 2 * width
      address ^= (address >> 7 & (width // 16 - 1)) << 4
    elif width == 16:
      address = first + row // 8 * stride + row % 8 * 16
      address = address + column // 16 * leading + column % 16
    else:
      address = first + row // 8 * stride + row % 8 * width + column
      address ^= (address >> 7 & (width // 16 - 1)) << 4
    index = address[..., None] + np.arange(2)
    return self.shared.bytes[index].view(BF16)[..., 0].astype(np.float64)

  def wgmma(self, columns, operands):
    """A product m64 of each four warps; sums in the registers that are named first."""
    out, a, b, is_added, scale_a, scale_b, *transposed = operands
    # Of an operand in registers nothing says whether it is.
    left_too = "1" in transposed[:-1]
    if (scale_a, scale_b) != ("1", "1") or left_too or self.threads % 128:
      raise NotImplementedError("such a wgmma")
    by_group = lambda name: self.value(name, 64).reshape(-1, 128)
    is_turned = transposed[-1] == "1"
    right = np.stack([self.tile(d, columns, is_turned).T for d in by_group(b)])
    if a.startswith("{"):
      left = self.left(self.names(a)).reshape(len(right), 64, 16)
    else:
      left = np.stack([self.tile(d, 64) for d in by_group(a)])
    product = (left @ right).reshape(-1, 16, columns)
    out, is_added = self.names(out), self.value(is_added, 1)
    self.add_product(out, product, out if is_added.all() else None)


def launch(ptx, grid, arrays):
  """Runs a kernel; returns the arrays after it.

  Args:
    ptx: Text with one entry.
    grid: Blocks in x, y and z.
    arrays: One for each parameter, inputs and outputs; one that is given twice is one
      array.
  """
  program = parse(ptx)
  distinct = list({id(a): a for a in arrays}.values())
  memory = Arrays(distinct)
  place = [next(i for i, d in enumerate(distinct) if d is a) for a in arrays]
  memory.addresses = [memory.addresses[i] for i in place]
  with np.errstate(all="ignore"):
    for z, y, x in np.ndindex(*grid[::-1]):
      Block(program, memory, (x, y, z)).run()
  return [memory.array(i) for i in place]
