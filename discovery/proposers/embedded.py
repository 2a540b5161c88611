"""The embedded proposer: deterministic, offline, typed edit cards.

All arms share cards, priors and draws; they differ only in the evidence that the
scoring below may read. It shows that the machinery works and what its parts change in
a stated world. It cannot show what a language model would do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mxjax.discovery.core import edit_templates as cards_
from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import RejectedError
from mxjax.discovery.core.edit_templates import Card
from mxjax.discovery.core.proposal import (
  Context,
  ExhaustedError,
  Experiment,
  Proposal,
  ProposerError,
)

NAME = "embedded-v1"
OPTIMISM = 0.5
"""Weight of the bonus for edits tried seldom, in units of the best gain seen."""


@dataclasses.dataclass(frozen=True)
class _Option:
  """One card with parameters, and how often and how well it went before."""

  card: Card
  params: dict[str, Any]
  label: str
  trials: tuple[Experiment, ...]


class EmbeddedProposer:
  """Picks the best-scored card for the parent."""

  def __init__(self, cards: Sequence[Card], target: str, name: str = NAME) -> None:
    """Takes a task's cards."""
    self._cards, self._target = list(cards), target
    self._by_id = {card.id: card for card in cards}
    self.name = f"{name}:{cards_.fingerprint(cards)[:12]}"

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`."""
    options = self._options(context)
    if context.evidence == "none":
      return self._blind(options, context)
    options = self._masked(options, context)
    if not options:
      raise ExhaustedError("every card was tried on this parent")
    scored = sorted(options, key=lambda o: (-self._score(o, context), o.label))
    return self._proposal(scored[0], context)

  def _blind(self, options: list[_Option], context: Context) -> Proposal:
    """Placebos: uniform over the library, whatever was seen before.

    From the initial program one edit would reach a handful of programs, so there an
    independent sample is a composition of edits of different hooks.
    """
    address = (context.seed, *context.address, len(context.history), "blind")
    count = 1
    if context.restarts:
      count += int(identity.draw(*address, "count") * len(_hooks(options)))
    chosen: list[_Option] = []
    for option in identity.shuffled(options, *address):
      taken = {hook for o in chosen for hook in o.card.hooks}
      if len(chosen) < count and not taken & set(option.card.hooks):
        chosen.append(option)
    if not chosen:
      raise ExhaustedError("every card was tried on this parent")
    proposal = self._proposal(chosen[0], context)
    source = proposal.source
    for option in chosen[1:]:
      source = option.card.edit(source, option.params)
    label = "+".join(option.label for option in chosen)
    return dataclasses.replace(proposal, source=source, label=label)

  def _options(self, context: Context) -> list[_Option]:
    """Applicable edits that were not tried on this parent already."""
    tried = {(e.parent, e.label) for e in context.history}
    need = context.required
    repeats = need and need.response == "add_discriminator" and need.survivors
    options = []
    for card in self._cards:
      if not card.applies(context.parent.plan):
        continue
      for params in card.params:
        label = card.label(params)
        if (context.parent.id, label) in tried and not repeats:
          continue
        trials = tuple(e for e in context.history if e.label == label)
        options.append(_Option(card, dict(params), label, trials))
    return options

  def _masked(self, options: list[_Option], context: Context) -> list[_Option]:
    """QuantForge's response map: a mask on what may come next, not a bonus.

    When the mask leaves nothing the demand cannot be met by this library, and the
    unmasked options stand.
    """
    if context.evidence != "verdict":
      return options
    retired = {
      e.label.split("(")[0]
      for e in context.history
      if e.verdict in ("no_effect", "unsafe") and e.reason != "parent_equivalent"
    }
    live = [o for o in options if o.card.id not in retired]
    if context.required is None:
      open_now = {r.observable for r in context.residuals}
      focused = [o for o in live if o.card.residual in open_now]
      return focused or live or options
    required = context.required
    card = self._by_id.get(required.label.split("(")[0])
    if card is None:
      return live or options
    same_site = lambda o: set(o.card.hooks) & set(card.hooks)
    match required.response if required.survivors else "new_account":
      case "extend":
        follow = {card.id, *card.follow_ups}
        answer = [o for o in live if o.card.id in follow and o.label != required.label]
      case "add_discriminator":
        answer = [o for o in live if o.label == required.label]
      case _:
        # The gain or the signature is real and its account is not, or no account is
        # left: another act on the same computation, with accounts of its own.
        answer = [o for o in live if same_site(o) and o.card.id != card.id]
    return answer or live or options

  def _score(self, option: _Option, context: Context) -> float:
    """Prior, optimism, and what the arm's evidence says."""
    seed = context.seed
    prior = identity.draw(seed, option.label, "prior")
    gains = [max(-e.changes.get(self._target, 0.0), 0.0) for e in context.history]
    scale = max([1e-9, *gains])
    wins = sum(e.gain for e in option.trials)
    losses = len(option.trials) - wins
    score = 0.05 * prior + OPTIMISM / (1 + len(option.trials))
    score += 0.3 * (wins - losses)
    if context.evidence in ("text", "reflect", "verdict"):
      related = [e for e in context.history if e.label.startswith(option.card.id + "(")]
      if related:
        mean = sum(e.changes.get(self._target, 0.0) for e in related) / len(related)
        score -= 0.3 * mean / scale
    if context.evidence in ("reflect", "verdict"):
      siblings = [
        e
        for e in context.history
        if self._family(e.label) == option.card.family and e.status == "ok"
      ]
      if siblings:
        score += 0.2 * (2 * sum(e.gain for e in siblings) / len(siblings) - 1)
      failed_here = [
        e for e in option.trials if not e.gain and e.parent == context.parent.id
      ]
      score -= 0.5 * bool(failed_here)
    return score + 0.1 * identity.draw(seed, *context.address, option.label, "explore")

  def _family(self, label: str) -> str:
    card = self._by_id.get(label.split("(")[0])
    return card.family if card else ""

  def _proposal(self, option: _Option, context: Context) -> Proposal:
    card = option.card
    try:
      source = card.edit(context.parent.source, option.params)
    except (SyntaxError, RejectedError) as error:
      raise ProposerError(f"card {card.id} cannot edit the program: {error}") from error
    return Proposal(
      source=source,
      label=option.label,
      note=card.statement,
      residual=card.residual,
      explanations=card.explanations,
      controls=card.controls,
      declared=card.hooks,
    )


def _hooks(options: list[_Option]) -> set[str]:
  return {hook for option in options for hook in option.card.hooks}
