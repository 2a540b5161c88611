"""The editable interface of a task: its hooks and the arrays that they exchange.

Only arrays of declared shape and dtype cross this boundary, so types enforce the
contract of the task: a candidate cannot hand over anything else.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mxjax.errors import ValueRefusal

Literal = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Aval:
  """Dtype (a NumPy name) and shape of one array of a unit: block, head, linear, layer.

  A dimension may be the name of a size, whose values are in `Interface.sizes`.
  """

  dtype: str
  shape: tuple[int | str, ...]

  def to_list(self) -> list[Any]:
    """Returns the form sent to workers: `[dtype, [dimensions]]`."""
    return [self.dtype, list(self.shape)]

  @property
  def text(self) -> str:
    """Dtype and shape in words, such as `float32[32, width]`."""
    return (
      f"{self.dtype}[{', '.join(map(str, self.shape))}]"
      if self.shape
      else (f"{self.dtype} scalar")
    )


Tree = Aval | Mapping[str, Aval]
"""One array, or a flat dictionary of named arrays."""
Sizes = Sequence[Mapping[str, int]]
"""The kinds of unit that there are: for each, its sizes by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
  """One pure function of a program.

  Attributes:
    name: Name of the function in the source.
    outputs: Arrays that it returns, in order; a single array is returned bare.
    batched: Arguments with a leading batch axis in the batched form; empty when the
      evaluator calls the hook unit by unit. A unit never sees its neighbours.
    default: Source of the inherited function.
    active_when: Plan key and the values under which the hook runs; None for always.
    doc: Purpose of the hook, for people and prompts.
  """

  name: str
  arguments: Mapping[str, Tree]
  outputs: tuple[Aval, ...]
  default: str
  batched: tuple[str, ...] = ()
  active_when: tuple[str, tuple[Literal, ...]] | None = None
  doc: str = ""

  def is_active(self, plan: Mapping[str, Literal]) -> bool:
    """Returns whether the evaluator calls this hook under a plan."""
    return self.active_when is None or plan[self.active_when[0]] in self.active_when[1]

  @property
  def signature(self) -> str:
    """Arguments and results with shapes and dtypes, in words."""
    shown = lambda tree: (
      tree.text
      if isinstance(tree, Aval)
      else "{" + ", ".join(f'"{key}": {aval.text}' for key, aval in tree.items()) + "}"
    )
    arguments = ", ".join(f"{k}: {shown(tree)}" for k, tree in self.arguments.items())
    results = ", ".join(aval.text for aval in self.outputs)
    return f"{self.name}({arguments}) -> {results}"

  def to_dict(self, sizes: Sizes = ({},)) -> dict[str, Any]:
    """Returns what a worker needs to trace the hook or to check its artifacts.

    The hook is traced once for each distinct choice, in `sizes`, of what it names.
    """
    leaves = [
      aval
      for tree in (*self.arguments.values(), *self.outputs)
      for aval in ([tree] if isinstance(tree, Aval) else tree.values())
    ]
    named = {size for aval in leaves for size in aval.shape if isinstance(size, str)}
    # A kind of unit that lacks a size is none of this hook: an MLP has no head. Kinds
    # that agree in what the hook names need one trace.
    own: list[dict[str, int]] = []
    for each in sizes:
      chosen = {name: each[name] for name in sorted(named) if name in each}
      if len(chosen) == len(named) and chosen not in own:
        own.append(chosen)
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
      "sizes": own,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface:
  """All hooks of a task, and the grammar of its plan.

  Attributes:
    hooks: Hooks in the order in which they run.
    plan: Allowed values of every plan key, the default first.
    header: Imports at the top of the default program.
    plan_docs: What each plan key decides, for people and prompts.
    sizes: Sizes of the units of the task's data, by the names in its hooks' shapes.
    frozen: Names of hooks that were left out: trusted code does there what it does for
      every program, and a function of such a name would never be called.
  """

  hooks: tuple[Hook, ...]
  plan: Mapping[str, tuple[Literal, ...]] = dataclasses.field(
    default_factory=lambda: {"unused": (False,)}
  )
  plan_docs: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {"unused": "nothing"}
  )
  header: str = "import jax\nimport jax.numpy as jnp\n"
  sizes: Sizes = ({},)
  frozen: tuple[str, ...] = ()

  def hook(self, name: str) -> Hook:
    """Returns the hook with this name.

    Raises:
      ValueError: There is none.
    """
    for hook in self.hooks:
      if hook.name == name:
        return hook
    raise ValueRefusal(
      "interface",
      expected=f"a hook among {', '.join(self.names)}",
      got=repr(name),
      mend="name one of these",
    )

  def without(self, names: Collection[str]) -> "Interface":
    """Returns the interface without some hooks."""
    hooks = tuple(hook for hook in self.hooks if hook.name not in names)
    return dataclasses.replace(self, hooks=hooks, frozen=(*self.frozen, *names))

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the hooks, in order."""
    return tuple(hook.name for hook in self.hooks)

  @property
  def default_plan(self) -> dict[str, Literal]:
    """Plan of the default program."""
    return {key: values[0] for key, values in self.plan.items()}

  def default_source(self) -> str:
    """Returns the source of the default program, with every hook written out."""
    plan = "".join(f"  {k!r}: {v!r},\n" for k, v in self.default_plan.items())
    parts = [self.header, f"PLAN = {{\n{plan}}}\n", *(h.default for h in self.hooks)]
    return "\n\n".join(part.strip() for part in parts) + "\n"

  def to_list(self) -> list[dict[str, Any]]:
    """Returns the hooks in the form that is sent to workers."""
    return [hook.to_dict(self.sizes) for hook in self.hooks]
