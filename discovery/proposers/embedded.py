"""The embedded proposer: deterministic, offline, based on typed edit templates.

All arms share templates, priors and draws; they differ only in the evidence that the
scores below may read. The proposer shows that the machinery works and what its parts
change in a specified world. It cannot show what a language model would do.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import RejectedError
from mxjax.discovery.core.edit_templates import EditTemplate, fingerprint, id_of
from mxjax.discovery.core.proposal import (
  Context,
  Demand,
  ExhaustedError,
  Experiment,
  Proposal,
  ProposerError,
)
from mxjax.discovery.core.verdict import Response, Verdict

NAME = "embedded-v1"
NOTHING_LEFT = "every card was tried on this parent"
"""Wording found in the logs of stored runs; a card is an edit template."""
OPTIMISM = 0.5
"""Weight of the bonus for rarely tried edits, in units of the best gain seen."""


@dataclasses.dataclass(frozen=True)
class _Option:
  """A template with parameters, and the experiments in which it was tried."""

  template: EditTemplate
  params: dict[str, Any]
  label: str
  trials: tuple[Experiment, ...]


class _Past:
  """What the history says of labels, templates and families, read once a proposal.

  Attributes:
    trials: Experiments by label.
    changes: Changes of the target by template.
    gains: Whether the experiments that ran gained, by family.
    supported: Families with a gain for the reason that the edit gave.
    refuted: Families with a gain for another reason.
    best: The best gain, at least 1e-9.
  """

  def __init__(
    self,
    history: Sequence[Experiment],
    target: str,
    templates: Mapping[str, EditTemplate],
  ) -> None:
    self.trials: dict[str, list[Experiment]] = defaultdict(list)
    self.changes: dict[str, list[float]] = defaultdict(list)
    self.gains: dict[str, list[bool]] = defaultdict(list)
    self.supported: set[str] = set()
    self.refuted: set[str] = set()
    self.best = 1e-9
    for experiment in history:
      template = id_of(experiment.label)
      change = experiment.changes.get(target, 0.0)
      self.trials[experiment.label].append(experiment)
      self.changes[template].append(change)
      self.best = max(self.best, -change)
      family = getattr(templates.get(template), "family", "")
      if experiment.status == "ok":
        self.gains[family].append(experiment.gain)
      if experiment.verdict == Verdict.SUPPORTED:
        self.supported.add(family)
      elif experiment.verdict == Verdict.TARGET_ONLY:
        self.refuted.add(family)


class EmbeddedProposer:
  """Applies the edit template with the best score to the parent."""

  def __init__(self, templates: Sequence[EditTemplate], target: str) -> None:
    """Takes a task's templates and the observable to lower."""
    self._templates, self._target = list(templates), target
    self._by_id = {template.id: template for template in templates}
    self.name = f"{NAME}:{fingerprint(templates)[:12]}"

  def propose(self, context: Context) -> Proposal:
    """Returns the edit that scores best by what the arm may read."""
    past = _Past(context.history, self._target, self._by_id)
    options = self._options(context, past)
    if context.evidence == "none":
      return self._blind(options, context)
    options = self._allowed(options, context)
    if not options:
      raise ExhaustedError(NOTHING_LEFT)
    best = min(options, key=lambda o: (-_score(o, context, past), o.label))
    return self._proposal([best], context)

  def _blind(self, options: list[_Option], context: Context) -> Proposal:
    """Samples edits uniformly from the library, ignoring the history (placebo arms).

    One edit of the initial program would reach only a handful of programs, so with
    restarts a sample combines edits of different hooks.
    """
    address = (context.seed, *context.address, len(context.history), "blind")
    count = 1
    if context.restarts:
      hooks = {hook for option in options for hook in option.template.hooks}
      count += int(identity.draw(*address, "count") * len(hooks))
    drawn: list[_Option] = []
    for option in identity.shuffled(options, *address):
      taken = {hook for o in drawn for hook in o.template.hooks}
      if len(drawn) < count and not taken & set(option.template.hooks):
        drawn.append(option)
    if not drawn:
      raise ExhaustedError(NOTHING_LEFT)
    return self._proposal(drawn, context)

  def _options(self, context: Context, past: _Past) -> list[_Option]:
    """Returns applicable edits that were not yet tried on this parent."""
    tried = {(e.parent, e.label) for e in context.history}
    demand = _asked(context)
    repeats = (
      demand and demand.response == Response.ADD_DISCRIMINATOR and demand.survivors
    )
    options = []
    for template in self._templates:
      if not template.applies(context.parent.plan):
        continue
      for params in template.params:
        label = template.label(params)
        # A new control is asked of an edit that was made: that edit is allowed once
        # more.
        if (context.parent.id, label) in tried and not repeats:
          continue
        trials = tuple(past.trials.get(label, ()))
        options.append(_Option(template, dict(params), label, trials))
    return options

  def _allowed(self, options: list[_Option], context: Context) -> list[_Option]:
    """Masks the options by the demands on the parent; this is not a score bonus.

    Without a demand, edits for the question of this round go first. If the mask leaves
    nothing, this library cannot meet the demand, and options that are not forbidden are
    returned for the search to refuse.
    """
    if context.evidence != "verdict":
      return options
    bans = [d for d in context.demands if d.forbids]
    banned = {id_of(d.label) for d in bans}
    live = [o for o in options if o.template.id not in banned]
    for ban in bans:
      # The parent still has what is forbidden, so only an edit of that place gets rid
      # of it.
      if context.parent.full_call.part(ban.computation) == ban.intervention:
        live = [o for o in live if set(o.template.hooks) & set(ban.computation)]
    if (demand := _asked(context)) is not None:
      focused = self._answers(live, demand)
    else:
      asked = context.focus.observable if context.focus is not None else None
      focused = [o for o in live if o.template.residual == asked]
    return focused or live

  def _answers(self, options: list[_Option], demand: Demand) -> list[_Option]:
    template = self._by_id.get(id_of(demand.label))
    if template is None:
      return options
    if demand.response == Response.ADD_DISCRIMINATOR and demand.survivors:
      return [o for o in options if o.label == demand.label]
    there = [o for o in options if set(o.template.hooks) & set(demand.computation)]
    if demand.response == Response.EXTEND and demand.survivors:
      next_ = {template.id, *template.follow_ups}
      return [o for o in there if o.template.id in next_ and o.label != demand.label]
    # The gain or the signature is real but its explanation is wrong, or no explanation
    # is left: try another edit of the same computation, with its own explanations.
    return [o for o in there if o.template.id != template.id]

  def _proposal(self, options: list[_Option], context: Context) -> Proposal:
    """Applies all edits to the parent; the experiment is that of the first edit."""
    source, template = context.parent.source, options[0].template
    for option in options:
      try:
        source = option.template.edit(source, option.params)
      except (SyntaxError, RejectedError) as error:
        raise ProposerError(
          f"edit template {option.template.id} cannot edit the program: {error}"
        ) from error
    return Proposal(
      source=source,
      label="+".join(option.label for option in options),
      note=template.statement,
      residual=template.residual,
      explanations=template.explanations,
      controls=template.controls,
      declared=template.hooks,
    )


def _score(option: _Option, context: Context, past: _Past) -> float:
  """Adds prior, optimism and the terms that the arm's evidence allows."""
  prior = identity.draw(context.seed, option.label, "prior")
  wins = sum(e.gain for e in option.trials)
  # What every arm reads: how often edits of this label were tried and gained. The prior
  # of a label is the same in every arm.
  score = 0.05 * prior + OPTIMISM / (1 + len(option.trials))
  score += 0.3 * (wins - (len(option.trials) - wins))
  if context.evidence in ("text", "reflect", "controls", "verdict"):
    # The template's mean change of the target, in units of the best gain.
    if related := past.changes.get(option.template.id):
      score -= 0.3 * (sum(related) / len(related)) / past.best
  if context.evidence in ("reflect", "controls", "verdict"):
    # The balance of gains among experiments of its family, from -1 to 1.
    if siblings := past.gains.get(option.template.family):
      score += 0.2 * (2 * sum(siblings) / len(siblings) - 1)
    score -= 0.5 * any(
      not e.gain and e.parent == context.parent.id for e in option.trials
    )
  if context.evidence == "verdict":
    # An idea that a control bore out goes first, one that it unmasked goes last.
    family = option.template.family
    score += (family in past.supported) - (family in past.refuted)
  where = (context.seed, *context.address, option.label, "explore")
  return score + 0.1 * identity.draw(*where)


def _asked(context: Context) -> Demand | None:
  """Returns the demand that the proposal is checked on, if there is one."""
  return next((d for d in context.demands if not d.forbids), None)
