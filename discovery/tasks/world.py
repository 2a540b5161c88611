"""A synthetic world whose causal truth is known.

It has six sites and six operations. The seed decides what each operation is at each
site: a mechanism that lowers the residual of the site and with it the loss, a mediator
that moves only the residual, capacity (any edit of that size gains, whatever it does),
inert, or harmful. A mechanism depends on the previous one, so the worthwhile edits
change as the program does. Verdicts, explanations and checkers can be judged against
the truth, and a whole run takes seconds.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate, id_of
from mxjax.discovery.core.residual import Control, Explanation, Predicted
from mxjax.discovery.core.task import Artifacts, Call
from mxjax.discovery.tasks.synthetic import Synthetic, margins, site_interface

SITES = ("geometry", "balance", "weights", "activations", "attention", "mlp")
OPERATIONS: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
  "shift": ("jnp.roll(x, 1)", lambda x: np.roll(x, 1, -1)),
  "mirror": ("x[::-1]", lambda x: x[..., ::-1]),
  "comb": (
    "x * jnp.array([1, -1] * 4, x.dtype)",
    lambda x: x * np.array([1, -1] * 4, x.dtype),
  ),
  "skip": ("jnp.roll(x, 3)", lambda x: np.roll(x, 3, -1)),
  "lift": (
    "jnp.full_like(x, 1) * x.mean()",
    lambda x: np.ones_like(x) * x.mean(-1, keepdims=True),
  ),
  "squash": ("jnp.tanh(3 * x)", lambda x: np.tanh(3 * x)),
}
"""Operations at a site, as candidate source and as a function of rows `[rows, 8]`."""
FULL = 0.5
"""Amplitude at which an operation has its full effect."""
AMPLITUDES = (0.25, 0.5, 1.0, -0.5)
REGIMES: Mapping[str, tuple[str, ...]] = {
  "Geometric shaping": ("geometry", "balance"),
  "Discrete realization": ("weights", "activations"),
  "Structural recovery": ("attention", "mlp"),
}
LAYERS = 4
UNREAD = 0.1
"""Probability that a layer does not read a site."""
INTERFACE = site_interface(SITES, {"remeasure": (False, True)})
"""One hook per site, on rows of eight numbers."""


class World(Synthetic):
  """A synthetic landscape; see `mxjax.discovery.core.task.Task`.

  `truth` holds the kind of each operation, by site and operation.
  """

  name, sites, rows, threshold = "world", SITES, 16, 0.5
  interface = INTERFACE
  regimes = REGIMES
  margins: Mapping[str, float] = margins(SITES)
  interventions: Mapping[str, str] = {
    "permute": "{site}: the edit's size at the site, with what it does permuted",
    "elsewhere": "{site}: the edit done where no site reads it",
    "dose": "{site}, {factor}: the edit scaled",
  }

  def __init__(self, seed: int = 0, transfer: int = 0) -> None:
    """Draws a world.

    `seed` decides the truth; `transfer` decides only the sizes of effects and noise.
    The held-out world has the truth of the visible one with other magnitudes.
    """
    super().__init__(seed, transfer)
    basis = [apply(self._inputs).ravel() for _, apply in OPERATIONS.values()]
    self._solve = np.linalg.pinv(np.stack(basis, 1).astype(np.float64))
    self.truth = {site: self._site_truth(site) for site in SITES}
    order = identity.shuffled(SITES, seed, "order")
    self.prerequisite = dict(zip(order[1:], order, strict=False))

  def _site_truth(self, site: str) -> dict[str, str]:
    is_capacity = identity.draw(self._seed, site, "capacity") < 0.34
    kinds = ["mechanism", "mediator", "inert", "inert", "inert", "harmful"]
    if is_capacity:
      kinds = ["capacity"] * 3 + ["mediator", "inert_capacity", "harmful"]
    return dict(
      zip(OPERATIONS, identity.shuffled(kinds, self._seed, site, "kinds"), strict=True)
    )

  @property
  def contract(self) -> Mapping[str, Any]:
    """Digest of the truth, which stands for weights, tokens and evaluator."""
    return {"world": identity.digest([self.truth, self.prerequisite, self._transfer])}

  def _amounts(self, change: np.ndarray) -> np.ndarray:
    """Returns the amplitude of each operation in a change."""
    return self._solve @ change.ravel()

  def _values(
    self, done: dict[str, np.ndarray], call: Call, artifacts: Artifacts
  ) -> dict[str, float]:
    amplitudes = self._intervened(done, call.intervention, artifacts)
    values = self._landscape(amplitudes, bool(call.plan["remeasure"]))
    return values | self._layers(amplitudes)

  def _intervened(
    self,
    amplitudes: dict[str, np.ndarray],
    intervention: Mapping[str, Any],
    artifacts: Artifacts,
  ) -> dict[str, np.ndarray]:
    """Returns the amplitudes under a control, which acts on the change by the edit."""
    if not intervention:
      return amplitudes
    kind, site = intervention["kind"], intervention["site"]
    before, _ = self._behaviour(intervention["parent"]["computation"][site], artifacts)
    edit = amplitudes[site] - before
    if kind == "permute":
      # The same size of edit, carried by an operation that does nothing by itself.
      quiet = [i for i, op in enumerate(OPERATIONS) if "inert" in self.truth[site][op]]
      size, edit = np.abs(edit).sum(), np.zeros(len(OPERATIONS))
      edit[quiet[0]] = size
    elif kind == "elsewhere":
      edit = np.zeros(len(OPERATIONS))
    elif kind == "dose":
      edit = edit * float(intervention["factor"])
    else:
      raise ValueError(
        f"world: unknown intervention {kind!r}; use {self.interventions}."
      )
    return {**amplitudes, site: before + edit}

  def _layers(self, amplitudes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the output sizes of the layers, each a weighted sum over most sites."""
    sizes = {site: float(np.abs(a).sum()) for site, a in amplitudes.items()}
    reads = lambda layer, site: identity.draw(self._seed, layer, site, "reads")
    return {
      f"layer_{layer}": 1.0
      + sum(
        weight * size
        for site, size in sizes.items()
        if (weight := reads(layer, site)) >= UNREAD
      )
      for layer in range(LAYERS)
    }

  def focal_is_true(self, label: str) -> bool:
    """Returns whether the labelled edit really acts on the cause of its site's loss."""
    site, operation = id_of(label).split("-")
    return self.truth[site][operation] == "mechanism" and "=-" not in label

  def ideal(self) -> float:
    """Returns the loss, without chaos, with the right edit at every site."""
    amplitudes = {}
    for site in SITES:
      kinds = self.truth[site]
      best = "capacity" if "capacity" in kinds.values() else "mechanism"
      first = next(op for op in OPERATIONS if kinds[op] == best)
      amplitudes[site] = np.array([FULL * (op == first) for op in OPERATIONS])
    return self._landscape(amplitudes, remeasure=True)["loss"]

  def _gain(self, site: str) -> float:
    return 0.08 + 0.16 * identity.draw(self._seed, self._transfer, site, "gain")

  def _landscape(
    self, amplitudes: Mapping[str, np.ndarray], remeasure: bool
  ) -> dict[str, float]:
    loss, values = 3.0, {}
    reach: dict[str, float] = {}
    for site in identity.shuffled(SITES, self._seed, "order"):
      before = self.prerequisite.get(site)
      ready = 1.0 if before is None else reach[before]
      amount = dict(zip(OPERATIONS, amplitudes[site], strict=True))
      kinds = self.truth[site]
      of = lambda kind, kinds=kinds, amount=amount: sum(
        amount[op] for op in OPERATIONS if kinds[op] == kind
      )
      size = float(np.abs(amplitudes[site]).sum())
      working = min(max(of("mechanism") / FULL, 0.0), 1.0)
      moving = min(max(of("mediator") / FULL, 0.0), 1.0)
      is_capacity = "capacity" in kinds.values()
      strength = min(size / FULL, 1.0) if is_capacity else working
      gain = self._gain(site) * strength * (0.25 + 0.75 * ready)
      if remeasure and before is not None:
        gain *= 1.15
      loss -= gain
      loss += 0.1 * min(abs(of("harmful")) / FULL, 2.0)
      loss += 0.06 * max(size - 1.2, 0.0) ** 2
      loss += 0.05 * max(-of("mechanism") / FULL, 0.0)
      reach[site] = 1.0 if is_capacity and strength > 0.5 else working
      quiet = 0.35 if ready < 0.5 else 0.9
      values[f"excess_{site}"] = quiet * (1.0 - 0.8 * max(working, moving))
    return {"loss": loss, **values}

  @property
  def edit_templates(self) -> Sequence[EditTemplate]:
    """Every operation at every site, all described alike; most are decoys."""
    return [_template(site, op) for site, op in itertools.product(SITES, OPERATIONS)]


def _template(site: str, operation: str) -> EditTemplate:
  excess = f"excess_{site}"
  gains: Predicted = {"loss": "down"}
  keeps: Predicted = {"loss": "same"}
  source, _ = OPERATIONS[operation]
  return EditTemplate(
    id=f"{site}-{operation}",
    hooks=(site,),
    template=f"\ndef {site}(x):\n  return x + {{amplitude}} * {source}\n",
    params=tuple({"amplitude": a} for a in AMPLITUDES),
    residual=excess,
    family=site,
    statement=f"{operation} at {site} removes its excess",
    explanations=(
      Explanation(
        "mechanism",
        f"{operation} acts on what makes {site} lose",
        {
          "primary": {**gains, excess: "down"},
          "permute": {**keeps, excess: "same"},
          "elsewhere": keeps,
        },
      ),
      Explanation(
        "capacity",
        f"any edit of this size at {site} gains",
        {"primary": gains, "permute": gains, "elsewhere": keeps},
      ),
      Explanation(
        "drift",
        "any edit of this size anywhere gains",
        {"primary": gains, "permute": gains, "elsewhere": gains},
      ),
      Explanation(
        "mediator",
        f"the excess of {site} falls and nothing follows from it",
        {"primary": {**keeps, excess: "down"}},
      ),
      Explanation(
        "nothing", "the edit does nothing", {"primary": {**keeps, excess: "same"}}
      ),
      Explanation("harm", "the edit destroys something", {"primary": {"loss": "up"}}),
    ),
    controls=tuple(
      Control(name, {"kind": name, "site": site, "parent": True, **more}, cost, told)
      for name, more, cost, told in (
        ("permute", {}, 1, "the same size, another act"),
        ("elsewhere", {}, 1, "where no site reads it"),
        ("dose", {"factor": 0.5}, 2, "half the dose"),
      )
    ),
  )
