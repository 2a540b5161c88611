"""A synthetic world whose causal truth is known.

It has six sites and six operations. The seed decides what each operation is at each
site: a mechanism that lowers the residual of the site and with it the loss, a mediator
that moves only the residual, capacity (any edit of that size gains, whatever it does),
inert, or harmful. A mechanism depends on the previous one, so the worthwhile edits
change as the program does. Verdicts, explanations and checkers can be judged against
the truth, and a whole run takes seconds.

With luck, some operations gain on the visible draw of the noise, nearly as a mechanism
does, and do nothing on any other draw. Only the control `redraw`, or a gain that
another operation surpasses, tells them from a mechanism: both lower the excess alike,
and its readings are noisy, so that a few mixtures of operations do not decode a world.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate, id_of
from mxjax.discovery.core.interface import Aval, Hook, Interface
from mxjax.discovery.core.interventions import Intervention, Interventions, Value
from mxjax.discovery.core.residual import (
  Control,
  Explanation,
  Predicted,
  Residual,
  Rival,
)
from mxjax.discovery.core.task import Artifacts, Call, ContractError, Defaults

WIDTH, ROWS, LAYERS = 8, 16, 4
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
MARGIN, CHAOS = 0.004, 0.001
"""The margin of the loss is four times the chaos."""
THRESHOLD = 0.5
"""Excess of a site above which it is an open question."""
OPEN, CLOSED, LOWERED = 0.9, 0.35, 0.8
"""Excess of a site once the one before it works, before that, and the share of it that
an edit at its full amplitude removes."""
LUCKY_SHARE = 0.5, 0.9
"""Least and largest share of a mechanism's gain that a lucky operation has."""
EXCESS_MARGIN, EXCESS_CHAOS = 0.25, 0.1
"""Of an excess in a world with luck: two readings differ by 0.2 at most by chance."""
EXACT_MARGIN = 0.02
"""The margin of an excess in a world without luck, where its readings have no noise."""
SIZE_FREE = 1.2, 0.75
"""Size of what is done at a site above which it costs loss, without luck and with it.
With luck a mixture of two full operations costs more than the margin, so that nobody
holds on to a lucky one beside the mechanism for nothing."""
SIZE_COST = 0.06, 0.25
"""Loss for each square of the size above that."""
UNREAD = 0.1
"""Probability that a layer does not read a site."""
REGIMES: Mapping[str, tuple[str, ...]] = {
  "Geometric shaping": ("geometry", "balance"),
  "Discrete realization": ("weights", "activations"),
  "Structural recovery": ("attention", "mlp"),
}


def _hook(site: str) -> Hook:
  row = Aval("float32", (WIDTH,))
  return Hook(
    name=site,
    arguments={"x": row},
    outputs=(row,),
    batched=("x",),
    default=f"def {site}(x):\n  return x\n",
    doc=f"What is done at the site {site} to a row of {WIDTH} numbers; the default "
    "does nothing. What it adds to x is decomposed into the six operations.",
  )


INTERFACE = Interface(
  hooks=tuple(map(_hook, SITES)),
  plan={"remeasure": (False, True)},
  plan_docs={
    "remeasure": "whether each site but the first is measured again after the site "
    "before it acted; it scales what these sites gain of the loss, and moves no excess"
  },
)
"""One hook per site, on rows of eight numbers."""
_SITE = Value(doc="the site whose edit is changed", one_of=SITES)
_REDRAWN = Value(
  doc="the sites; your edit changes one of them or more", one_of=SITES, several=True
)
_example = lambda kind, **more: {"kind": kind, "site": SITES[0], **more}


INTERVENTIONS: Interventions = {
  "permute": Intervention(
    doc="what your edit adds at the site to what the PARENT does there, at the same "
    "size, carried by an operation that does nothing",
    example=_example("permute"),
    values={"site": _SITE},
    of_parent=True,
  ),
  "elsewhere": Intervention(
    doc="what your edit adds at the site to what the parent does there, done where no "
    "site reads it: the site is as in the parent",
    example=_example("elsewhere"),
    values={"site": _SITE},
    of_parent=True,
  ),
  "dose": Intervention(
    doc="what your edit adds at the site to what the parent does there, scaled",
    example=_example("dose", factor=0.5),
    values={"site": _SITE, "factor": Value(doc="its scale", bounds=(-4.0, 4.0))},
    of_parent=True,
  ),
  "redraw": Intervention(
    doc="what the program does at these sites, measured on another draw of the "
    "evaluator's noise; one call, however many sites",
    example={"kind": "redraw", "sites": [*SITES[:2]]},
    values={"sites": _REDRAWN},
    elsewhere=True,
  ),
}


class World(Defaults):
  """A synthetic landscape; see `mxjax.discovery.core.task.Task`.

  `truth` holds the kind of each operation, by site and operation.
  """

  name, target = "world", "loss"
  interface = INTERFACE
  regimes = REGIMES
  margins: Mapping[str, float] = {
    "loss": MARGIN,
    **{f"excess_{site}": EXACT_MARGIN for site in SITES},
  }
  floors: Mapping[str, tuple[float, ...]] = {
    # Of an open site, and of one whose predecessor does not work yet.
    f"excess_{site}": (OPEN * (1 - LOWERED), CLOSED * (1 - LOWERED))
    for site in SITES
  }
  description = (
    "A synthetic landscape with a known truth that is hidden from you. Six sites, one "
    "hook each, act on rows of eight float32 numbers; what a hook adds to x is "
    "decomposed, by least squares, into six operations: "
    + "; ".join(f"{name} = {source}" for name, (source, _) in OPERATIONS.items())
    + f". An operation has its full effect at amplitude {FULL}, as in `return x + "
    f"{FULL} * jnp.roll(x, 1)`; far larger ones cost loss. At each site each operation "
    "is of one kind: mechanism (lowers the site's excess and the loss), mediator "
    "(lowers the excess alone), inert, harmful. Several operations at a site may be of "
    "one kind, and the amplitudes of one kind add up. Some sites have no mechanism, "
    "and any edit of a size gains there, whatever its operations; only a mediator "
    "lowers the excess of such a site. Of several operations at one site the effects "
    "do not add: what lowers its excess is the larger of its mechanisms' and its "
    f"mediators' amplitude, each up to {FULL}; its size is the sum of all amplitudes. "
    f"A site works as far as its mechanism has its effect (half at {FULL / 2}), or, "
    f"where any edit gains, once the size is above {FULL / 2}; a mediator does "
    "not make it work. A site can work while it is closed. "
    "The sites are one chain in an order that you are not told: each "
    "but the first, which is open, depends on the one before it. "
    "While that one works by less than half, a site is closed: it gains "
    f"little, and its excess is {CLOSED} or, lowered by a mechanism or mediator of its "
    f"own, {CLOSED * (1 - LOWERED):.2g}. From half on, the site is open: it "
    f"gains more, and its excess is {OPEN} or, lowered by its own, "
    f"{OPEN * (1 - LOWERED):.2g}. So an excess that jumps from {CLOSED} to {OPEN}, or "
    f"from {CLOSED * (1 - LOWERED):.2g} to {OPEN * (1 - LOWERED):.2g}, says "
    "that the site before it began to work; it is no harm done at this site."
  )
  luck_told = (
    " This world has luck: at most sites one or two operations are lucky. On the draw "
    "of the noise by which programs are scored they lower excess and loss as a "
    "mechanism does, and make the site work for the next one, but gain only "
    f"{LUCKY_SHARE[0]} to {LUCKY_SHARE[1]} of its gain; on any other draw they do "
    "nothing. The program that a run ends with is scored at last on another draw. "
    f"Readings of an excess have a noise of up to {EXCESS_CHAOS} up or down: an open "
    "site that is lowered is not told from a closed one by a single reading. A size "
    f"above {SIZE_FREE[1]} at a site costs loss."
  )
  observables: Mapping[str, str] = {
    "loss": f"the target, without unit; chaos of {CHAOS} is in every reading",
    **{
      f"excess_{site}": "what is left to gain at the site of that name (values are "
      "listed by name, which is not the order of the chain)"
      for site in SITES
    },
    "layer_N": "size of the output of layer N, a weighted sum of the sizes of edits",
  }

  def __init__(self, seed: int = 0, transfer: int = 0, luck: float = 0.0) -> None:
    """Draws a world.

    `seed` decides the truth; `transfer` decides only the sizes of effects and noise.
    `luck` is the share of inert operations that gain on the visible draw of the noise
    alone. The held-out world has the truth of the visible one with other magnitudes.
    """
    self._seed, self._transfer, self._luck = seed, transfer, luck
    self.interventions = {
      kind: each for kind, each in INTERVENTIONS.items() if luck or kind != "redraw"
    }
    if luck:
      self.description += self.luck_told
      self.margins = {**self.margins} | {f"excess_{s}": EXCESS_MARGIN for s in SITES}
      # No reading is exact enough to say that nothing is left to gain.
      self.floors = {}
    # The rows are those of every world: a seed draws the truth and not the inputs.
    generator = np.random.default_rng(1234)
    self._inputs = generator.standard_normal((ROWS, WIDTH)).astype(np.float32)
    self._known: dict[str, tuple[np.ndarray, str]] = {}
    basis = [apply(self._inputs).ravel() for _, apply in OPERATIONS.values()]
    # A hook's change of the rows is decomposed by least squares into amplitudes of the
    # six operations: the landscape knows a program by these alone.
    self._solve = np.linalg.pinv(np.stack(basis, 1).astype(np.float64))
    self.truth = {site: self._site_truth(site) for site in SITES}
    order = identity.shuffled(SITES, seed, "order")
    self.prerequisite = dict(zip(order[1:], order, strict=False))

  def _site_truth(self, site: str) -> dict[str, str]:
    is_capacity = identity.draw(self._seed, site, "capacity") < 0.34
    kinds = ["mechanism", "mediator", "inert", "inert", "inert", "harmful"]
    if is_capacity:
      kinds = ["capacity"] * 3 + ["mediator", "inert_capacity", "harmful"]
    drawn = identity.shuffled(kinds, self._seed, site, "kinds")
    truth = dict(zip(OPERATIONS, drawn, strict=True))
    # One inert operation stays so: the control `permute` carries an edit's size by it.
    inert = [operation for operation, kind in truth.items() if kind == "inert"][1:]
    for operation in inert:
      if identity.draw(self._seed, site, operation, "luck") < self._luck:
        truth[operation] = "lucky"
    return truth

  @property
  def spec(self) -> Mapping[str, Any]:
    """JSON from which `task.load` rebuilds the task."""
    spec = {"task": self.name, "seed": self._seed, "transfer": self._transfer}
    return {**spec, "luck": self._luck} if self._luck else spec

  @property
  def contract(self) -> Mapping[str, Any]:
    """Digest of the truth, which stands for weights, tokens and evaluator."""
    return {"world": identity.digest([self.truth, self.prerequisite, self._transfer])}

  def holdout(self) -> Self:
    """Returns the same truth with other magnitudes and another draw of the noise."""
    return type(self)(self._seed, self._transfer + 1, self._luck)

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Returns the sites whose excess is above the threshold.

    With luck, whose operations lower an excess as well, the loss is always open.
    """
    found = [
      Residual(program, name, values[name], THRESHOLD)
      for site in SITES
      if values[name := f"excess_{site}"] > THRESHOLD
    ]
    if self._luck:
      found.append(Residual(program, "loss", values["loss"], 0.0))
    return found

  def refuses(self, intervention: Mapping[str, Any], own: Call, parent: Call) -> str:
    """Refuses a control of sites that the edit leaves as they were."""
    sites = intervention.get("sites") or [intervention["site"]]
    if any(own.part([site]) != parent.part([site]) for site in sites):
      return ""
    return f"{intervention['kind']}: the edit changes nothing at {', '.join(sites)}"

  def rivals(self, own: Call, parent: Call) -> Sequence[Rival]:
    """Returns size as an account of an edit of one site, and luck of any edit."""
    sites = [site for site in SITES if own.part([site]) != parent.part([site])]
    found = []
    if len(sites) == 1:
      statement = "any edit of this size at the site gains, whatever it does"
      change = {"kind": "permute", "site": sites[0]}
      found.append(Rival("any edit of this size", statement, change))
    if sites and self._luck:
      statement = "half of the gain or more is of this draw of the noise alone"
      redrawn = {"kind": "redraw", "sites": sites}
      found.append(Rival("luck of the draw", statement, redrawn, keeps=False))
    return found

  @property
  def rivals_told(self) -> Sequence[str]:
    """The size of the edit, and its luck in a world that has it."""
    lines = ["`any edit of this size` (1 call), for an edit of one site"]
    luck = "`luck of the draw` (1 call: all sites that the edit changes, redrawn)"
    return [*lines, luck] if self._luck else lines

  @property
  def references(self) -> Mapping[str, float]:
    """The loss that can be attained, where there is no luck.

    With luck it would tell a program that has some from one that has none.
    """
    named = "the right operation at every site, remeasured"
    return {} if self._luck else {named: self.ideal()}

  @property
  def example(self) -> Mapping[str, Any]:
    """An edit of the site that is open at the start, by none of the operations."""
    site = identity.shuffled(SITES, self._seed, "order")[0]
    excess = f"excess_{site}"
    account = lambda name, statement, symbol: {
      "name": name,
      "statement": statement,
      "predictions": {"primary": {excess: "down"}, "inert": {excess: symbol}},
    }
    return {
      "label": f"roll by two at {site}",
      "note": "Its excess is the largest.",
      "code": f"def {site}(x):\n  return x + 0.5 * jnp.roll(x, 2)\n",
      "declared": [site],
      "residual": excess,
      "explanations": [
        account("the roll acts", "an inert edit of its size does nothing", "lost"),
        account("any size acts", "an inert edit of its size does as much", "kept"),
      ],
      "controls": [
        {
          "name": "inert",
          "intervention": {"kind": "permute", "site": site},
          "statement": "the same size, carried by what does nothing",
        }
      ],
    }

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs every site's hook on the fixed rows and evaluates the landscape."""
    del before
    done, outputs = {}, {}
    for site in SITES:
      done[site], outputs[site] = self._behaviour(call.computation[site], artifacts)
    redrawn: Sequence[str] = ()
    if call.intervention.get("kind") == "redraw":
      redrawn = call.intervention["sites"]
    elif call.intervention:
      done = self._intervened(done, call.intervention, artifacts)
    values = self._landscape(done, bool(call.plan["remeasure"]), redrawn)
    values |= self._layers(done)
    shown = sorted(outputs.items())
    # Drawn from what the hooks return, so that a program reads the same wherever it
    # runs.
    noise = identity.draw(self._seed, self._transfer, shown, "chaos")
    values["loss"] += CHAOS * (2 * noise - 1)
    if self._luck:
      # However the sites are listed, it is one reading.
      listed = dict(call.intervention) | {"sites": sorted(redrawn)}
      own = [self._seed, self._transfer, shown, listed]
      for site in SITES:
        noise = identity.draw(own, site, "excess")
        values[f"excess_{site}"] += EXCESS_CHAOS * (2 * noise - 1)
    return {"values": values, "outputs": outputs}, b""

  def _behaviour(
    self, computation: str, artifacts: Artifacts
  ) -> tuple[np.ndarray, str]:
    """Returns the amplitudes of a hook's operations, and a digest of its result."""
    if computation not in self._known:
      result = np.asarray(jax.jit(artifacts.batched(computation))(self._inputs)[0])
      if not np.isfinite(result).all():
        raise FloatingPointError("world: a hook returned NaN or inf.")
      change = (result - self._inputs).astype(np.float64)
      shown = hashlib.sha256(result.tobytes()).hexdigest()[:16]
      self._known[computation] = self._solve @ change.ravel(), shown
    return self._known[computation]

  def _intervened(
    self,
    amplitudes: dict[str, np.ndarray],
    intervention: Mapping[str, Any],
    artifacts: Artifacts,
  ) -> dict[str, np.ndarray]:
    """Returns the amplitudes under a control, which acts on the change by the edit."""
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
      raise ContractError(f"world: unknown {kind!r}; use {[*self.interventions]}.")
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

  def _lucky_share(self, site: str) -> float:
    least, largest = LUCKY_SHARE
    return least + (largest - least) * identity.draw(self._seed, site, "lucky share")

  def _gain(self, site: str) -> float:
    return 0.08 + 0.16 * identity.draw(self._seed, self._transfer, site, "gain")

  def _landscape(
    self,
    amplitudes: Mapping[str, np.ndarray],
    remeasure: bool,
    redrawn: Sequence[str] = (),
  ) -> dict[str, float]:
    loss, values = 3.0, {}
    reach: dict[str, float] = {}
    # In the order of the chain, because each site asks how far the one before it works.
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
      # A lucky operation lowers the excess like a mechanism, and a part of the loss, on
      # the visible draw alone: neither a redrawn site nor the held-out world has that.
      if not self._transfer and site not in redrawn:
        lucky = min(max(of("lucky") / FULL, 0.0), 1.0)
        moving = max(moving, min(working + lucky, 1.0))
        working = max(working, self._lucky_share(site) * lucky)
      # Where capacity is the truth any edit gains by its size; elsewhere the mechanism
      # does.
      is_capacity = "capacity" in kinds.values()
      strength = min(size / FULL, 1.0) if is_capacity else working
      # A quarter of the gain comes even before the site before it works.
      gain = self._gain(site) * strength * (0.25 + 0.75 * ready)
      if remeasure and before is not None:
        gain *= 1.15
      loss -= gain
      # What costs: a harmful operation, size beyond what is free, and a mechanism
      # reversed.
      loss += 0.1 * min(abs(of("harmful")) / FULL, 2.0)
      cost, free = SIZE_COST[self._luck > 0], SIZE_FREE[self._luck > 0]
      loss += cost * max(size - free, 0.0) ** 2
      loss += 0.05 * max(-of("mechanism") / FULL, 0.0)
      reach[site] = 1.0 if is_capacity and strength > 0.5 else working
      # Below the threshold until the site before it works, so that questions open in
      # order. A mediator lowers the excess as a mechanism does, and gains nothing.
      quiet = CLOSED if ready < 0.5 else OPEN
      values[f"excess_{site}"] = quiet * (1.0 - LOWERED * max(working, moving))
    return {"loss": loss, **values}

  @property
  def edit_templates(self) -> Sequence[EditTemplate]:
    """Every operation at every site, all described alike; most are decoys."""
    pairs = itertools.product(SITES, OPERATIONS)
    return [_template(site, op, luck=bool(self._luck)) for site, op in pairs]


def _at(site: str, kind: str) -> dict[str, Any]:
  where = {"sites": [site]} if kind == "redraw" else {"site": site}
  return {"kind": kind, **where}


def _template(site: str, operation: str, *, luck: bool) -> EditTemplate:
  excess = f"excess_{site}"
  gains: Predicted = {"loss": "down"}
  keeps: Predicted = {"loss": "same"}
  source, _ = OPERATIONS[operation]
  redrawn: Mapping[str, Predicted] = {"redraw": gains} if luck else {}
  accounts = [
    Explanation(
      "mechanism",
      f"{operation} acts on what makes {site} lose",
      {
        "primary": {**gains, excess: "down"},
        "permute": {**keeps, excess: "same"},
        "elsewhere": keeps,
        **redrawn,
      },
    ),
    Explanation(
      "capacity",
      f"any edit of this size at {site} gains",
      {"primary": gains, "permute": gains, "elsewhere": keeps, **redrawn},
    ),
    Explanation(
      "drift",
      "any edit of this size anywhere gains",
      {"primary": gains, "permute": gains, "elsewhere": gains, **redrawn},
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
  ]
  controls = [
    ("permute", {}, "the same size, another act"),
    ("elsewhere", {}, "where no site reads it"),
    ("dose", {"factor": 0.5}, "half the dose"),
  ]
  if luck:
    lucky = {"primary": {**gains, excess: "down"}, "redraw": keeps}
    accounts.append(Explanation("lucky", "it fits this draw of the noise", lucky))
    controls.append(("redraw", {}, "the noise drawn again"))
  return EditTemplate(
    id=f"{site}-{operation}",
    hooks=(site,),
    template=f"\ndef {site}(x):\n  return x + {{amplitude}} * {source}\n",
    params=tuple({"amplitude": a} for a in AMPLITUDES),
    residual=excess,
    family=site,
    statement=f"{operation} at {site} removes its excess",
    explanations=tuple(accounts),
    controls=tuple(
      Control(kind, _at(site, kind) | more, statement=statement)
      for kind, more, statement in controls
    ),
  )
