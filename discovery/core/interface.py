"""The editable interface of a task: which hooks a program has and what they exchange.

Only arrays of declared shape and dtype cross the boundary, so the contract of a task is
enforced by types: whatever a candidate computes, it can hand over nothing else.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Literal = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Aval:
  """Dtype (a NumPy name) and shape of one array of a unit: a block, a head, a layer."""

  dtype: str
  shape: tuple[int, ...]

  def to_list(self) -> list[Any]:
    """The form that goes to the workers: `[dtype, [dimensions]]`."""
    return [self.dtype, list(self.shape)]


Tree = Aval | Mapping[str, Aval]
"""One array, or a flat dictionary of named ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
  """One pure function of a program.

  Attributes:
    name: Name of the function in the source.
    arguments: Argument name to its arrays, in order.
    outputs: The arrays it returns, in order; one array is returned bare.
    batched: Arguments that get a leading batch axis in the fast form, or empty when
      the evaluator calls the hook unit by unit. A unit never sees its neighbours.
    default: Source of the inherited function.
    active_when: Plan key and the values under which the hook runs; None for always.
    doc: What it is for, for people and prompts.
  """

  name: str
  arguments: Mapping[str, Tree]
  outputs: tuple[Aval, ...]
  default: str
  batched: tuple[str, ...] = ()
  active_when: tuple[str, tuple[Literal, ...]] | None = None
  doc: str = ""

  def is_active(self, plan: Mapping[str, Literal]) -> bool:
    """Whether a plan makes the evaluator call this hook."""
    return self.active_when is None or plan[self.active_when[0]] in self.active_when[1]

  def to_dict(self) -> dict[str, Any]:
    """What a worker needs in order to trace the hook or to check an artifact of it."""
    plain = lambda tree: (
      tree.to_list()
      if isinstance(tree, Aval)
      else {k: plain(v) for k, v in tree.items()}
    )
    return {
      "name": self.name,
      "arguments": [[name, plain(tree)] for name, tree in self.arguments.items()],
      "outputs": [aval.to_list() for aval in self.outputs],
      "batched": list(self.batched),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface:
  """All hooks of a task, and the grammar of its plan.

  Attributes:
    hooks: The hooks in the order in which they run.
    plan: Allowed values of every plan key, the default first.
    header: Imports that the default program begins with.
  """

  hooks: tuple[Hook, ...]
  plan: Mapping[str, tuple[Literal, ...]]
  header: str = "import jax\nimport jax.numpy as jnp\n"

  def hook(self, name: str) -> Hook:
    """The hook of that name.

    Raises:
      KeyError: There is none.
    """
    return next(h for h in self.hooks if h.name == name)

  @property
  def names(self) -> tuple[str, ...]:
    """Hook names in order."""
    return tuple(hook.name for hook in self.hooks)

  @property
  def default_plan(self) -> dict[str, Literal]:
    """The plan of the default program."""
    return {key: values[0] for key, values in self.plan.items()}

  def default_source(self) -> str:
    """Source text of the default program, every hook written out."""
    plan = "".join(f"  {k!r}: {v!r},\n" for k, v in self.default_plan.items())
    parts = [self.header, f"PLAN = {{\n{plan}}}\n", *(h.default for h in self.hooks)]
    return "\n\n".join(part.strip() for part in parts) + "\n"

  def to_list(self) -> list[dict[str, Any]]:
    """The hooks in the form that goes to the workers."""
    return [hook.to_dict() for hook in self.hooks]
