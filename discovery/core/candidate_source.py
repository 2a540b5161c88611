"""Parses and edits candidate source (hooks and a literal plan) without executing it."""

import ast
import copy
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.interface import Interface, Literal

MAX_BYTES = 65_536
OPERATIONS = 4_000
"""Operations of the traced program of one hook, a loop's body counted once."""
CONSTANT_BYTES = 40 * 1024
"""Five 32 x 32 matrices in float64: enough for structure, too little for weights."""
VALUE_BYTES = 256 << 20
"""Bytes of all values that one unit computes, or else `TIMES_DECLARED` times those of
its arguments and results; what a loop computes counts once."""
TIMES_DECLARED = 64
FLOPS = 1 << 36
"""Floating-point operations of one unit, a loop's counted once: seconds of one core.
What loops add to that ends at the time limit of a call."""
TRACE_SECONDS = 180
"""Processor seconds in which a hook is traced."""
WALL_SECONDS = 7200.0
"""Seconds by a clock on the wall of a trace, of its check, or of one phase of a call.
Twelve that share one core end before that; what does not hangs."""
MAX_DEPTH = 100
"""Deepest nesting of the syntax tree, far within Python's recursion limit."""
MAX_INTEGER_BITS = 1024
"""Longest integer constant; Python does not print much longer ones."""
IMPORTS = ("functools", "jax", "jax.lax", "jax.numpy", "math", "numpy")
USUAL = {
  "functools": "import functools",
  "lax": "from jax import lax",
  "math": "import math",
  "np": "import numpy as np",
}
"""Imports of names that functions use, where they come without them."""
# Names and attributes that reach files, settings, callbacks or code by its text. The
# jail stops what they would do; a refusal here tells the proposer the line.
FORBIDDEN_NAMES = frozenset(
  """breakpoint classmethod compile delattr dir eval exec exit getattr globals hasattr
  help id input locals memoryview object open print property quit setattr staticmethod
  super type vars""".split()
)
FORBIDDEN_ATTRIBUTES = frozenset(
  """callback compiler_utils config core custom_derivatives debug distributed dump ext
  experimental export extend ffi fromfile interpreters io_callback lib load loads
  make_jaxpr memmap monitoring profiler pure_callback save savetxt stages test_util
  tofile tools tree_util xla_computation""".split()
)
# A hook is a pure function that is traced once: it needs no state, no objects of its
# own and nothing that waits.
FORBIDDEN_NODES = (
  ast.AsyncFunctionDef,
  ast.Await,
  ast.ClassDef,
  ast.Delete,
  ast.Global,
  ast.Nonlocal,
  ast.Try,
  ast.With,
  ast.Yield,
  ast.YieldFrom,
)


class RejectedError(ValueError):
  """Raised for source that is not admitted; none of it was executed."""


@dataclasses.dataclass(frozen=True)
class CandidateSource:
  """An admitted candidate.

  Attributes:
    plan: The literal `PLAN`, completed with defaults.
    hooks: Normalized source of each hook that the candidate defines.
  """

  source: str
  plan: Mapping[str, Literal]
  hooks: Mapping[str, str]

  @property
  def id(self) -> str:
    """Digest of the source; comments, docstrings and layout do not affect it."""
    return identity.digest(_normalized(self.source))


def admit(source: str, interface: Interface) -> CandidateSource:
  """Admits the source text of one module by inspecting its syntax tree.

  This check serves honest mistakes and readable errors. It is not the boundary that
  contains hostile code; the jail is.

  Raises:
    RejectedError: The source breaks a rule; the message names the line and the rule.
  """
  try:
    if (size := len(source.encode())) > MAX_BYTES:
      raise RejectedError(f"program: at most {MAX_BYTES} bytes, got {size}.")
    tree = _parsed(source)
    # The parser lets pass what only the compiler refuses, such as `return` outside of a
    # function. This module's own future statements do not count.
    compile(tree, "<candidate>", "exec", dont_inherit=True)
    # What Python cannot print again, such as some f-strings, cannot be edited later.
    ast.parse(ast.unparse(tree))
  # It is a ValueError as well, which the next clause would wrap in words of its own.
  except RejectedError:
    raise
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise RejectedError(f"program: does not parse: {error}.") from error
  # Every node against the list of what is allowed, then the statements of the module.
  for node in ast.walk(tree):
    _check_node(node)
  hooks: dict[str, str] = {}
  plan = interface.default_plan
  _check_plan_is_literal(tree)
  for node in tree.body:
    if isinstance(node, ast.FunctionDef):
      if node.name in hooks:
        raise RejectedError(f"program: line {node.lineno} defines {node.name} again.")
      hooks[node.name] = ast.unparse(node)
    elif _assigned(node) == "PLAN":
      plan |= _read_plan(node, interface)
    elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) and not (
      isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
      raise RejectedError(
        f"program: line {node.lineno}: a module holds imports, constants, PLAN and "
        f"functions; {type(node).__name__} is none of them."
      )
    # Hooks are known by `def`: one that is bound otherwise would pass for one that is
    # left out.
    elif taken := _bound(node) & {*interface.names}:
      _refuse(node, f"{sorted(taken)} are hooks; define them by def")
  _check_signatures(tree, interface)
  known = {name: text for name, text in hooks.items() if name in interface.names}
  return CandidateSource(source, plan, known)


def _parsed(source: str) -> ast.Module:
  """Returns the syntax tree of a source.

  Raises:
    RejectedError: It does not parse, or is nested too deep.
  """
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise RejectedError(f"program: does not parse: {error}.") from error
  _check_depth(tree)
  return tree


def _check_depth(tree: ast.AST) -> None:
  """Refuses nesting that would exhaust recursion wherever the tree is visited."""
  # Level by level, because a recursive walk is what deep nesting exhausts.
  level: list[ast.AST] = [tree]
  for _ in range(MAX_DEPTH):
    level = [child for node in level for child in ast.iter_child_nodes(node)]
  if level:
    _refuse(level[0], f"nested more than {MAX_DEPTH} deep")


def _bound(node: ast.stmt) -> set[str]:
  """Returns the names that a statement binds, other than by `def`."""
  nodes = list(ast.walk(node))
  stored = {
    n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
  }
  return stored | {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}


def _assigned(node: ast.stmt) -> str | None:
  if isinstance(node, ast.Assign) and len(node.targets) == 1:
    target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else None
  return None


def _check_plan_is_literal(tree: ast.Module) -> None:
  """Refuses every other way to give PLAN a value than one assignment of a literal.

  The evaluator reads that one, and a program that trusts another would be misled.
  """
  plain = [node for node in tree.body if _assigned(node) == "PLAN"]
  if len(plain) > 1:
    _refuse(plain[1], "PLAN is assigned again; write it once")
  for node in ast.walk(tree):
    if node in plain:
      continue
    targets = [
      *(node.targets if isinstance(node, ast.Assign | ast.Delete) else []),
      *(
        [node.target]
        if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For)
        else []
      ),
    ]
    named = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    if "PLAN" in named:
      _refuse(node, "PLAN is changed; write it once, as PLAN = {...}")


def _read_plan(node: ast.stmt, interface: Interface) -> dict[str, Any]:
  assert isinstance(node, ast.Assign)
  try:
    plan = ast.literal_eval(node.value)
  except (ValueError, TypeError, SyntaxError, RecursionError) as error:
    raise RejectedError(f"program: PLAN must be a literal dict: {error}.") from error
  if not isinstance(plan, dict):
    raise RejectedError(f"program: PLAN must be a dict, got {type(plan).__name__}.")
  for key, value in plan.items():
    allowed = interface.plan.get(key)
    # True equals 1 and 1.0, which are other values of a plan.
    same = [v for v in allowed or () if v == value and type(v) is type(value)]
    if not same:
      raise RejectedError(
        f"program: PLAN[{key!r}] = {value!r} is not in the plan's grammar; allowed are "
        f"{dict(interface.plan)}."
      )
  return plan


def _refuse(node: ast.AST, what: str) -> None:
  raise RejectedError(f"program: line {getattr(node, 'lineno', '?')}: {what}.")


def _check_node(node: ast.AST) -> None:
  """Applies the syntax allow-list to one node."""
  if isinstance(node, FORBIDDEN_NODES):
    _refuse(node, f"{type(node).__name__} is not allowed")
  if isinstance(node, ast.Constant) and isinstance(node.value, int):
    if node.value.bit_length() > MAX_INTEGER_BITS:
      _refuse(node, f"an integer of more than {MAX_INTEGER_BITS} bits")
  if isinstance(node, ast.Import):
    for alias in node.names:
      if alias.name not in IMPORTS:
        _refuse(node, f"import of {alias.name}; allowed are {', '.join(IMPORTS)}")
  if isinstance(node, ast.ImportFrom):
    if node.level or node.module not in IMPORTS:
      _refuse(node, f"import from {node.module}; allowed are {', '.join(IMPORTS)}")
    for alias in node.names:
      if alias.name == "*" or alias.name in FORBIDDEN_ATTRIBUTES:
        _refuse(node, f"import of {alias.name}")
  if isinstance(node, ast.Name) and (
    node.id in FORBIDDEN_NAMES or node.id.startswith("__")
  ):
    _refuse(node, f"the name {node.id}")
  if isinstance(node, ast.Attribute):
    if node.attr.startswith("_") or node.attr in FORBIDDEN_ATTRIBUTES:
      _refuse(node, f"the attribute {node.attr}")
    if not isinstance(node.ctx, ast.Load):
      _refuse(node, f"assignment to the attribute {node.attr}")
  if isinstance(node, ast.FunctionDef) and node.name.startswith("__"):
    _refuse(node, f"a function named {node.name}")


def _check_signatures(tree: ast.Module, interface: Interface) -> None:
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name in interface.names:
      wanted = list(interface.hook(node.name).arguments)
      got = [argument.arg for argument in node.args.args]
      # What a hook takes beyond its declared arguments needs defaults: nobody passes
      # it.
      defaults = node.args.defaults
      if got[: len(wanted)] != wanted or len(got) - len(wanted) > len(defaults):
        _refuse(node, f"{node.name} must take {wanted}, got {got}")
      if node.decorator_list:
        _refuse(node, f"{node.name} is a hook and takes no decorator")


def _normalized(source: str) -> str:
  tree = ast.parse(source)
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.FunctionDef):
      if ast.get_docstring(node, clean=False) is not None:
        # A body that was its docstring alone must not become empty.
        node.body = node.body[1:] or [ast.Pass()]
  return ast.unparse(tree)


def hook_keys(source: str, hooks: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
  """Returns, per hook, a digest of everything that its tracing can depend on.

  The digest covers, in the order of the module, every statement that runs when it is
  imported, and the functions that the hook or these name, directly or through others;
  PLAN with its value, if one of them names it; and the sizes of the hook's units. Hooks
  with equal digests trace to the same program, each in a process of its own. `hooks`
  holds `Hook.to_dict()` by name.
  """
  body = ast.parse(source).body
  used = {name: _names(n) for n in body if (name := _function(n))}
  # Importing the module runs these for every hook, so what they call may change what
  # any hook finds.
  shared = {name for n in body if _runs(n) for name in _names(n)}
  shared |= {name for n in body if _runs(n) and (name := _function(n))}

  def seen(hook: str) -> list[str]:
    found: set[str] = set()
    waiting = {hook} | shared
    while waiting:
      found |= waiting
      waiting = {n for one in waiting for n in used.get(one, ())} - found
    # In the order of the module, because a later binding of a name replaces an earlier
    # one.
    return [
      ast.unparse(node)
      for node in body
      if (_name(node) == "PLAN" and "PLAN" in found)
      or _runs(node)
      or _function(node) in found
    ]

  return {
    name: identity.digest([name, seen(name), spec["sizes"]])
    for name, spec in hooks.items()
  }


def _function(node: ast.stmt) -> str | None:
  return node.name if isinstance(node, ast.FunctionDef) else None


def _runs(node: ast.stmt) -> bool:
  """Returns whether importing a module does more at a statement than to bind a name.

  So do decorators, defaults and annotations of a function. PLAN is a literal, whose
  value matters to those alone that name it.
  """
  if not isinstance(node, ast.FunctionDef):
    return _name(node) != "PLAN"
  given = node.args
  arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
  arguments += [each for each in (given.vararg, given.kwarg) if each is not None]
  executed = [
    *node.decorator_list,
    *given.defaults,
    *(each for each in given.kw_defaults if each is not None),
    *(each.annotation for each in arguments if each.annotation is not None),
    *([node.returns] if node.returns is not None else []),
  ]
  return any(not isinstance(each, ast.Constant) for each in executed)


def _names(node: ast.AST) -> set[str]:
  return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _with_imports(code: str, source: str) -> str:
  """Returns code with imports of the modules in `USUAL` that it uses and nobody binds.

  Functions are often written as if the module had them all: without an import, the
  first call would end by a `NameError`.
  """
  tree, new = _parsed(source), _parsed(code)
  bound = {name for node in (*tree.body, *new.body) if (name := _name(node))}
  for node in (*tree.body, *new.body):
    if isinstance(node, ast.Import | ast.ImportFrom):
      bound |= {(n.asname or n.name).partition(".")[0] for n in node.names}
  missing = [line for name, line in USUAL.items() if name in _names(new) - bound]
  return "\n".join([*missing, code])


def with_functions(source: str, code: str, *, replace: bool = True) -> str:
  """Returns `source` with its functions replaced by those of the same name in `code`.

  Without `replace`, only names that `source` does not define are added. New functions
  and constants go before the first function; imports are merged, and those of `USUAL`
  that the code lacks are added.

  Raises:
    RejectedError: A source does not parse, or is nested too deep.
  """
  code = _with_imports(code, source)
  tree, new = _parsed(source), _parsed(code)
  position = {_name(node): i for i, node in enumerate(tree.body) if _name(node)}
  added = []
  for node in new.body:
    name = _name(node)
    if name in position:
      if replace:
        tree.body[position[name]] = node
    elif ast.unparse(node) not in {ast.unparse(n) for n in tree.body}:
      added.append(node)
  first = next(
    (i for i, n in enumerate(tree.body) if isinstance(n, ast.FunctionDef)),
    len(tree.body),
  )
  tree.body[first:first] = added
  return ast.unparse(tree) + "\n"


def graft(source: str, donor: str, parts: Iterable[str], interface: Interface) -> str:
  """Returns a program with some hooks and plan values of another one.

  Functions and constants that a grafted hook needs come with it; where the program has
  others of the same name, they come under a new one.

  Raises:
    RejectedError: A source does not parse.
  """
  tree, other = _parsed(source), _parsed(donor)
  chosen = {*parts}
  mine = {name: ast.unparse(n) for n in tree.body if (name := _name(n))}
  theirs = {name: n for n in other.body if (name := _name(n)) and name != "PLAN"}
  hooks = [name for name in interface.names if name in chosen]
  # Everything that the hooks name, directly or through others, comes with them.
  needed: set[str] = set()
  waiting = {name for name in hooks if name in theirs}
  while waiting:
    needed |= waiting
    waiting = {n for one in waiting for n in _names(theirs[one])} & {*theirs} - needed
  # A helper of the same name and another text would change what the program's own hooks
  # call.
  taken = {
    name: f"{name}_of_parent"
    for name in needed - {*hooks}
    if name in mine and mine[name] != ast.unparse(theirs[name])
  }
  added = [ast.unparse(_renamed(theirs[n], taken)) for n in theirs if n in needed]
  # A hook that the donor leaves out has its default there.
  added += [interface.hook(name).default for name in hooks if name not in theirs]
  if {name for name in hooks if name not in theirs}:
    # Defaults may use the functions of the header, which the program may lack.
    source = with_functions(source, interface.header, replace=False)
  grafted = with_functions(source, "\n".join(added))
  # Completed with defaults, since the donor may leave a key out.
  plan = admit(donor, interface).plan
  keys = [name for name in interface.plan if name in chosen]
  return with_plan(grafted, {key: plan[key] for key in keys}) if keys else grafted


def _renamed(node: ast.stmt, names: Mapping[str, str]) -> ast.stmt:
  """Returns a copy of a statement with some names replaced."""
  copied = copy.deepcopy(node)
  for each in ast.walk(copied):
    if isinstance(each, ast.Name) and each.id in names:
      each.id = names[each.id]
    if isinstance(each, ast.FunctionDef) and each.name in names:
      each.name = names[each.name]
  return copied


def merged(source: str, code: str, plan: Mapping[str, Literal]) -> str:
  """Returns `source` with functions and plan values changed, and the rest as written.

  It executes as `with_functions` and `with_plan` would have it; comments and layout of
  what does not change stay, so that a difference shows the edit alone.

  Raises:
    RejectedError: A source does not parse, or is nested too deep.
  """
  code = _with_imports(code, source)
  tree, new, lines = _parsed(source), _parsed(code), source.splitlines()
  place = {name: n for n in tree.body if (name := _name(n))}
  # Lines of the source, from start to end, and what takes their place; an empty span
  # inserts.
  spans: dict[tuple[int, int], str] = {}
  added: list[str] = []
  known = {ast.unparse(n) for n in tree.body}
  for node in new.body:
    start, end = _span(node)
    text = "\n".join(code.splitlines()[start:end])
    if (name := _name(node)) in place:
      spans[_span(place[name])] = text
    elif ast.unparse(node) not in known:
      added.append(text)
  if plan and isinstance(node := place.get("PLAN"), ast.Assign):
    values = ast.literal_eval(node.value) | dict(plan)
    spans[_span(node)] = f"PLAN = {values!r}"
  elif plan:
    added.append(f"PLAN = {dict(plan)!r}")
  functions = [_span(n)[0] for n in tree.body if isinstance(n, ast.FunctionDef)]
  first = min(functions, default=len(lines))
  if added:
    spans[first, first] = "\n\n\n".join(added) + "\n\n"
  # From the end, so that the line numbers of what comes before stay right.
  for start, end in sorted(spans, reverse=True):
    lines[start:end] = spans[start, end].splitlines()
  return "\n".join(lines) + "\n"


def _span(node: ast.stmt) -> tuple[int, int]:
  """Returns the first line of a statement, with its decorators, and where it ends."""
  above = node.decorator_list if isinstance(node, ast.FunctionDef) else []
  first = min([node.lineno, *(each.lineno for each in above)])
  return first - 1, node.end_lineno or first


def with_plan(source: str, updates: Mapping[str, Literal]) -> str:
  """Returns `source` with some values of its `PLAN` replaced."""
  tree = ast.parse(source)
  for node in tree.body:
    if _assigned(node) == "PLAN":
      assert isinstance(node, ast.Assign)
      plan = ast.literal_eval(node.value) | dict(updates)
      node.value = ast.parse(repr(plan), mode="eval").body
      return ast.unparse(tree) + "\n"
  body = f"PLAN = {dict(updates)!r}\n"
  return with_functions(source, body)


def diff(before: str, after: str, names: tuple[str, str] = ("", "")) -> str:
  """Returns the unified difference of two sources; `names` head it if given.

  Without them it is short: no line that stays, and in the place of line numbers the
  name of the function or constant in which the first line of a change stands.
  """
  old, new = before.splitlines(), after.splitlines()
  if any(names):
    return "\n".join(difflib.unified_diff(old, new, *names, lineterm="", n=2))
  shown: list[str] = []
  # Without its first two lines, which name the files.
  for line in list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]:
    if (hunk := HUNK.fullmatch(line)) is None:
      shown.append(line)
      continue
    # The place is looked up in the new source, or in the old one if lines only go.
    lines, start = (old, hunk["old"]) if hunk["count"] == "0" else (new, hunk["new"])
    first = next((i for i in range(int(start) - 1, len(lines)) if lines[i]), 0)
    begun = [name[1] for each in lines[: first + 1] if (name := TOP.match(each))]
    shown.append(f"@@ {begun[-1]}" if begun else "@@")
  return "\n".join(shown)


def definitions(source: str) -> dict[str, str]:
  """Returns the text of each function and constant of a source by name, without PLAN.

  A source that does not parse has none.
  """
  try:
    body = _parsed(source).body
  except RejectedError:
    return {}
  lines = source.splitlines()
  return {
    name: "\n".join(lines[slice(*_span(node))])
    for node in body
    if (name := _name(node)) and name != "PLAN"
  }


def changed_definitions(before: str, after: str) -> dict[str, str]:
  """Returns the functions and constants of a source that another one has not, whole.

  They are by name, as written. Comments and layout make no difference.
  """
  bare = lambda text: ast.unparse(ast.parse(text))
  known = {name: bare(text) for name, text in definitions(before).items()}
  found = definitions(after).items()
  return {name: text for name, text in found if known.get(name) != bare(text)}


def users(source: str, names: Iterable[str], interface: Interface) -> tuple[str, ...]:
  """Returns the hooks of a source that name one of these functions or constants.

  They may do so through others of the module. A hook that the source leaves out has its
  default. The order is that of the interface.
  """
  texts = {hook.name: hook.default for hook in interface.hooks} | definitions(source)
  used = {name: _names(ast.parse(text)) for name, text in texts.items()}
  reached = {*names}
  while more := {n for n, named in used.items() if named & reached} - reached:
    reached |= more
  return tuple(name for name in interface.names if name in reached)


HUNK = re.compile(r"@@ -(?P<old>\d+)(?:,\d+)? \+(?P<new>\d+)(?:,(?P<count>\d+))? @@")
"""The head of a change in a unified difference."""
TOP = re.compile(r"(?:def )?([A-Za-z_]\w*)")
"""The name that a line of a module defines, if it does not continue another one."""


def _name(node: ast.stmt) -> str | None:
  return node.name if isinstance(node, ast.FunctionDef) else _assigned(node)
