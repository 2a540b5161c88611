"""The registered experiment of an edit: accounts that may be wrong, and their controls.

A control is the same tree with its changed part replaced by one that shares less with
it: `near` keeps its spectrum, or its freedom, and changes what it says; `far` keeps its
trace at most. Which of the two exist depends on the part's type. Most are programs of
their own, so one that ran before, as a candidate or a control, costs nothing.
"""

import re

from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.interface import Hook, Interface
from mxjax.discovery.core.residual import PRIMARY, Control, Explanation, Predicted
from mxjax.discovery.proposers.expressions import source
from mxjax.discovery.proposers.expressions.grammar import Grammar, Node

ACCOUNTS = (
  ("measured", "what the changed part says of a block does it", ()),
  ("kind", "any part of this spectrum or freedom does it", ("near",)),
  ("generic", "what surrounds the changed part does it", ("near", "far")),
)
"""Accounts of a gain: name, statement, and the controls that would gain as well."""


def register(
  grammar: Grammar,
  interface: Interface,
  target: str,
  before: Node | None,
  after: Node,
  path: tuple[int, ...],
) -> EditTemplate:
  """Returns the experiment of an edit that changed a tree at a path.

  `before` is the parent's tree, or None if its hook was not one. A control that would
  be the parent or the candidate itself is left out, and so are accounts that the rest
  cannot tell apart.
  """
  hook, part = after.production.name, after.at(path)
  residual = grammar.residuals[hook]
  variants: dict[str, Control] = {}
  for name, made in grammar.controls_of(part).items():
    if isinstance(made, Node):
      tree = after.replaced(path, made)
      told = f"{made.text} in the place of {part.text}"
      change = {"kind": "program", "code": source.code(grammar, interface, tree)}
      known = [t.children for t in (before, after) if t is not None]
      if tree.children not in known:
        variants[name] = Control(name, change, 1, told)
    elif _is_told(interface.hook(hook), part):
      told = "each block is told its neighbour's numbers"
      variants[name] = Control(name, {**made, "hooks": [hook]}, 1, told)
  better: Predicted = {target: "down", residual: "down"}
  accounts: dict[tuple[str, ...], Explanation] = {}
  for name, told, gaining in ACCOUNTS:
    under: dict[str, Predicted] = {
      control: {residual: "down" if control in gaining else "up"}
      for control in variants
    }
    told_apart = tuple(control for control in variants if control in gaining)
    account = Explanation(name, told, {PRIMARY: better, **under})
    accounts.setdefault(told_apart, account)
  return EditTemplate(
    id=hook,
    hooks=(hook,),
    residual=residual,
    explanations=(
      *accounts.values(),
      Explanation(
        "elsewhere",
        f"{target} gains and {residual} has nothing to do with it",
        {PRIMARY: {target: "down", residual: "same"}},
      ),
      Explanation(
        "local",
        f"{residual} falls and nothing follows from it",
        {PRIMARY: {target: "same", residual: "down"}},
      ),
      Explanation("harm", "the edit destroys something", {PRIMARY: {target: "up"}}),
    ),
    controls=tuple(variants.values()),
    family=hook,
    statement=after.text,
  )


def _is_told(hook: Hook, part: Node) -> bool:
  """Returns whether a part reads more than the unit that its hook is run on."""
  told = hook.arguments.keys() - set(hook.batched)
  codes = " ".join(node.production.code for _, node in part.walk())
  return bool(told & set(re.findall(r"\w+", codes)))
