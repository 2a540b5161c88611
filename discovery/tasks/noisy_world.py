"""A synthetic world in which a score improves for the wrong reason more often than not.

Twelve sites, eight ideas with eight variants each at every site. An idea is right,
lucky or idle, the same at all sites. Few variants do anything: one of a right idea
lowers the loss for good; one of a lucky idea lowers it on the visible draw of the
evaluator's noise alone, and counts for nothing on another draw, the held-out one among
them. Both lower the site's excess, so nothing that a candidate's own call shows tells
them apart; the control that draws the noise again does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate, id_of
from mxjax.discovery.core.residual import Control, Explanation
from mxjax.discovery.core.task import Artifacts, Call, ContractError
from mxjax.discovery.tasks.synthetic import WIDTH, Synthetic, margins, site_interface

STAGES = ("shape", "round", "recover")
SITES = tuple(f"{stage}_{part}" for stage in STAGES for part in "abcd")
KINDS = ("right",) * 2 + ("lucky",) * 5 + ("idle",)
"""What the eight ideas are, in an order that the seed decides."""
WORKS: Mapping[str, float] = {"right": 0.12, "lucky": 0.25, "idle": 0.0}
"""Shares of the variants that do something, by the kind of their idea."""
HARMS = 0.12
LUCK = 0.8
"""A lucky gain in units of the right one at the same site."""
EXCESS: Mapping[str, float] = {"right": 0.2, "lucky": 0.45, "none": 0.9}


class NoisyWorld(Synthetic):
  """A synthetic landscape; see `mxjax.discovery.core.task.Task`."""

  name, sites, rows, threshold = "noisy-world", SITES, 32, 0.4
  margins: Mapping[str, float] = margins(SITES)
  regimes: Mapping[str, tuple[str, ...]] = {
    stage: tuple(site for site in SITES if site.startswith(stage)) for stage in STAGES
  }
  interventions: Mapping[str, str] = {
    "redraw": "{site}: the edit's effect under another draw of the noise",
    "elsewhere": "{site}: the edit done where nothing reads it",
  }
  interface = site_interface(SITES, {"unused": (False,)})

  def __init__(self, seed: int = 0, transfer: int = 0) -> None:
    """Draws a world; `transfer` above 0 is its held-out form."""
    super().__init__(seed, transfer)
    self._solve = np.linalg.pinv(self._inputs.astype(np.float64))
    self.kinds = identity.shuffled(KINDS, seed, "kinds")
    self.effects = {site: self._effects(site) for site in SITES}

  def _effects(self, site: str) -> np.ndarray:
    """Returns what each variant of each idea does: `right`, `lucky`, `harm`, `idle`."""
    effects = np.full((WIDTH, WIDTH), "idle", dtype="<U5")
    for idea, kind in enumerate(self.kinds):
      for variant in range(WIDTH):
        drawn = identity.draw(self._seed, site, idea, variant)
        if drawn < WORKS[kind]:
          effects[idea, variant] = kind
        elif drawn > 1 - HARMS:
          effects[idea, variant] = "harm"
    if not (effects == "right").any():
      variant = int(identity.draw(self._seed, site, "sure") * WIDTH)
      effects[self.kinds.index("right"), variant] = "right"
    return effects

  @property
  def contract(self) -> Mapping[str, Any]:
    """Digest of the truth, which stands for weights, tokens and evaluator."""
    effects = {site: e.tolist() for site, e in self.effects.items()}
    return {"noisy world": identity.digest([effects, self._transfer])}

  def _amounts(self, change: np.ndarray) -> np.ndarray:
    """Returns how much of each variant of each idea is in a change."""
    return self._solve @ change

  @staticmethod
  def _digest(result: np.ndarray) -> str:
    return identity.digest(result.tobytes().hex())[:16]

  def _values(
    self, done: dict[str, np.ndarray], call: Call, artifacts: Artifacts
  ) -> dict[str, float]:
    redrawn = ""
    if change := call.intervention:
      kind, site = change["kind"], change["site"]
      if kind == "elsewhere":
        origin = change["parent"]["computation"][site]
        done[site] = self._behaviour(origin, artifacts)[0]
      elif kind == "redraw":
        redrawn = site
      else:
        raise ContractError(f"noisy world: unknown {kind!r}; use {self.interventions}.")
    return self._landscape(done, redrawn)

  def _gain(self, site: str) -> float:
    return 0.05 + 0.1 * identity.draw(self._seed, self._transfer, site, "gain")

  def _landscape(
    self, done: Mapping[str, np.ndarray], redrawn: str
  ) -> dict[str, float]:
    loss, values = 3.0, {}
    for site in SITES:
      active = set(self.effects[site][done[site] > 0.5])
      is_lucky = "lucky" in active and not self._transfer and site != redrawn
      share = 1.0 if "right" in active else LUCK * is_lucky
      loss -= share * self._gain(site) - 0.05 * ("harm" in active)
      best = next((kind for kind in ("right", "lucky") if kind in active), "none")
      values[f"excess_{site}"] = EXCESS[best]
    return {"loss": loss, **values}

  def ideal(self) -> float:
    """Returns the loss, without chaos, with a right edit at every site."""
    return 3.0 - sum(map(self._gain, SITES))

  def focal_is_true(self, label: str) -> bool:
    """Returns whether the labelled edit lowers the loss for good."""
    site, idea = id_of(label).split("-")
    variant = int(label.split("variant=")[1].split(")")[0])
    return self.effects[site][int(idea), variant] == "right"

  @property
  def edit_templates(self) -> Sequence[EditTemplate]:
    """Every variant of every idea at every site, all described alike."""
    return [_template(site, idea) for site in SITES for idea in range(WIDTH)]


def _template(site: str, idea: int) -> EditTemplate:
  excess = f"excess_{site}"
  both = {"loss": "down", excess: "down"}
  still = {"loss": "same"}
  accounts = {
    "right": ("what it does helps", {"redraw": both, "elsewhere": still}),
    "lucky": ("it fits the noise", {"redraw": still, "elsewhere": still}),
    "drift": ("any edit of this size", {"redraw": both, "elsewhere": both}),
  }
  explanations = [
    Explanation(name, statement, {"primary": both, **predictions})
    for name, (statement, predictions) in accounts.items()
  ]
  explanations += [
    Explanation("nothing", "it does nothing", {"primary": {**still, excess: "same"}}),
    Explanation("harm", "it destroys something", {"primary": {"loss": "up"}}),
  ]
  code = f"x + jnp.zeros_like(x).at[{{variant}}].set(x[{idea}])"
  return EditTemplate(
    id=f"{site}-{idea}",
    hooks=(site,),
    template=f"\ndef {site}(x):\n  return {code}\n",
    params=tuple({"variant": variant} for variant in range(WIDTH)),
    residual=excess,
    family=f"idea {idea}",
    statement=f"idea {idea} at {site}",
    explanations=tuple(explanations),
    controls=tuple(
      Control(kind, {"kind": kind, "site": site, "parent": True}, 1, told)
      for kind, told in (
        ("redraw", "the noise drawn again"),
        ("elsewhere", "where nothing reads it"),
      )
    ),
  )
