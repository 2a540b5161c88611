"""Typed expression trees: what a production takes and gives, and how many trees exist.

A grammar is data of a task. Every hook has a root production, whose `plan` parameters
are values of the candidate's plan. Types belong to a hook, so a tree never holds a
value that its hook is not told of. A node checks its parts when it is built; there is
no way to build an ill-typed one.
"""

import ast
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity

HOLE = "({})"
"""Stands for the changed part in the text of a control."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Production:
  """One way to make a value of a type.

  Attributes:
    type: Type of the value, qualified by its hook.
    takes: Types of the children.
    params: Allowed values of every parameter.
    code: JAX expression; `{0}`, `{1}`, ... are the children and `{name}` parameters.
    uses: Names of the helper functions that the code calls.
    plan: Parameters that are plan keys; only of a root.
    is_control: Whether only controls hold it.
  """

  name: str
  type: str
  takes: tuple[str, ...] = ()
  params: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
  code: str
  uses: tuple[str, ...] = ()
  plan: tuple[str, ...] = ()
  is_control: bool = False

  @functools.cached_property
  def settings(self) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Every combination of parameters."""
    grids = ([(name, value) for value in grid] for name, grid in self.params.items())
    return tuple(itertools.product(*grids))


@dataclasses.dataclass(frozen=True)
class Node:
  """A tree: a production with its parameters and children.

  Raises:
    ValueError: A child or a parameter is not what the production takes.
  """

  production: Production
  params: tuple[tuple[str, Any], ...] = ()
  children: tuple["Node", ...] = ()

  def __post_init__(self) -> None:
    """Refuses an ill-typed tree."""
    rule, got = self.production, tuple(c.production.type for c in self.children)
    if got != rule.takes:
      raise ValueError(f"{rule.name}: expected children {rule.takes}, got {got}.")
    # Written out, because 1 == True and 1 == 1.0.
    if repr(self.params) not in map(repr, rule.settings):
      raise ValueError(
        f"{rule.name}: expected parameters of {dict(rule.params)}, got {self.params}."
      )

  @functools.cached_property
  def text(self) -> str:
    """The tree in words, from which `Grammar.parse` builds it again."""
    parts = [c.text for c in self.children] + [f"{k}={v!r}" for k, v in self.params]
    return self.production.name + (f"({', '.join(parts)})" if parts else "")

  @functools.cached_property
  def depth(self) -> int:
    """Nodes on the longest way to a leaf."""
    return 1 + max((c.depth for c in self.children), default=0)

  def walk(
    self, path: tuple[int, ...] = ()
  ) -> Iterator[tuple[tuple[int, ...], "Node"]]:
    """Returns every node with the way to it, the root first."""
    yield path, self
    for index, child in enumerate(self.children):
      yield from child.walk((*path, index))

  def at(self, path: Sequence[int]) -> "Node":
    """Returns the node at a path."""
    return functools.reduce(lambda node, index: node.children[index], path, self)

  def replaced(self, path: Sequence[int], part: "Node") -> "Node":
    """Returns the tree with another part at a path."""
    if not path:
      return part
    children = list(self.children)
    children[path[0]] = children[path[0]].replaced(path[1:], part)
    return dataclasses.replace(self, children=tuple(children))


@dataclasses.dataclass(frozen=True)
class Grammar:
  """The productions of a task's hooks.

  Attributes:
    rules: Every production, the root of a hook under the hook's own name as its type.
    helpers: Source of each helper function.
    controls: What replaces a changed part of a type in a control: the text of a tree,
      or an intervention of the evaluator.
    defaults: Text of the tree that the inherited function of a hook amounts to.
    residuals: Observable of the question that edits of each hook address.
    depth: Of the deepest tree that is proposed, the root included.
  """

  rules: tuple[Production, ...]
  helpers: Mapping[str, str]
  controls: Mapping[str, Mapping[str, Any]]
  defaults: Mapping[str, str]
  residuals: Mapping[str, str]
  depth: int

  @classmethod
  def from_dict(cls, data: Mapping[str, Any], helpers: Mapping[str, str]) -> "Grammar":
    """Builds a grammar from its file, whose comment explains the fields."""
    rules = []
    for entry in data["productions"]:
      fields = {k: v for k, v in entry.items() if k not in ("hooks", "control")}
      for hook in entry["hooks"]:
        within = lambda kind, hook=hook: kind if kind == hook else f"{hook}.{kind}"
        typed = {
          "type": within(entry["type"]),
          "takes": tuple(map(within, entry.get("takes", ()))),
          "params": {
            k: tuple(map(_fixed, v)) for k, v in entry.get("params", {}).items()
          },
          "uses": tuple(entry.get("uses", ())),
          "plan": tuple(entry.get("plan", ())),
          "is_control": entry.get("control", False),
        }
        rules.append(Production(**{**fields, **typed}))
    return cls(
      tuple(rules),
      {**helpers, **data["helpers"]},
      data["controls"],
      data["defaults"],
      data["residuals"],
      data["depth"],
    )

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hash of everything in the grammar; a run's proposer is named after it."""
    rules = [dataclasses.asdict(rule) for rule in self.rules]
    others = (self.helpers, self.controls, self.defaults, self.residuals, self.depth)
    return identity.digest([rules, *others])

  def without(self, hooks: Collection[str]) -> "Grammar":
    """Returns the grammar whose edits leave some hooks alone."""
    kept = {hook: name for hook, name in self.residuals.items() if hook not in hooks}
    return dataclasses.replace(self, residuals=kept)

  @property
  def hooks(self) -> tuple[str, ...]:
    """Hooks that have a root, in order."""
    return tuple(self.residuals)

  def options(self, kind: str, depth: int) -> tuple[Production, ...]:
    """Returns productions of a type that have trees of at most this depth."""
    made = (r for r in self.rules if r.type == kind and not r.is_control)
    return tuple(r for r in made if self._trees(r, depth))

  def count(self, kind: str, depth: int | None = None) -> int:
    """Returns the exact number of trees of a type, at most `depth` deep."""
    depth = self.depth if depth is None else depth
    made = [r for r in self.rules if r.type == kind and not r.is_control]
    return sum(self._trees(rule, depth) for rule in made)

  def _trees(self, rule: Production, depth: int) -> int:
    known = self._counts.get((id(rule), depth))
    if known is None:
      parts = (self.count(kind, depth - 1) for kind in rule.takes)
      known = len(rule.settings) * math.prod(parts) if depth > 0 else 0
      self._counts[id(rule), depth] = known
    return known

  @functools.cached_property
  def _counts(self) -> dict[tuple[int, int], int]:
    return {}

  def parse(self, text: str, kind: str) -> Node:
    """Builds the tree of a type from its text.

    Raises:
      ValueError: The text is no tree of this type, or it is deeper than proposals are.
    """
    try:
      node = self._built(ast.parse(text, mode="eval").body, kind)
    except (SyntaxError, RecursionError) as error:
      raise ValueError(f"expression: {text[:80]!r} does not parse: {error}.") from error
    if node.depth > self.depth:
      raise ValueError(f"expression: at most {self.depth} deep, got {node.depth}.")
    return node

  def controls_of(self, part: Node) -> dict[str, Any]:
    """Returns what each control puts in the place of a changed part, by its name.

    That is another tree, or an intervention of the evaluator.
    """
    kind = part.production.type
    given = self.controls.get(kind.rpartition(".")[2], {})
    return {name: self._around(made, kind, part) for name, made in given.items()}

  def _around(self, made: Any, kind: str, part: Node) -> Any:
    if not isinstance(made, str):
      return made
    rule = made.removesuffix(HOLE)
    if rule == made:
      return self.parse(made, kind)
    return Node(self._rule(rule, kind), (), (part,))

  def _rule(self, name: str, kind: str) -> Production:
    for rule in self.rules:
      if rule.name == name and rule.type == kind:
        return rule
    raise ValueError(f"expression: expected a {kind}, got {name!r}, which makes none.")

  def _built(self, syntax: ast.expr, kind: str) -> Node:
    call = syntax if isinstance(syntax, ast.Call) else ast.Call(syntax, [], [])
    if not isinstance(call.func, ast.Name):
      raise ValueError(f"expression: expected a {kind}, got {ast.unparse(syntax)!r}.")
    rule = self._rule(call.func.id, kind)
    if len(call.args) != len(rule.takes):
      raise ValueError(f"{rule.name}: takes {rule.takes}, got {len(call.args)} parts.")
    params = tuple((str(k.arg), ast.literal_eval(k.value)) for k in call.keywords)
    pairs = zip(call.args, rule.takes, strict=True)
    return Node(rule, params, tuple(self._built(*pair) for pair in pairs))


def _fixed(value: Any) -> Any:
  """Returns a parameter of the file as one that can be hashed."""
  return tuple(value) if isinstance(value, list) else value
