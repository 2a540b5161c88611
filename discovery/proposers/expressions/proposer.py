"""Proposes programs whose hooks are trees: drawn, mutated, crossed over, or by a card.

Every choice is drawn at an address of the run, so the same history gives the same
proposal. Which of several drawn edits is proposed depends on what the arm may read of
earlier ones.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import EditTemplate, fingerprint, id_of
from mxjax.discovery.core.interface import Interface
from mxjax.discovery.core.proposal import (
  Context,
  Demand,
  ExhaustedError,
  Experiment,
  Proposal,
)
from mxjax.discovery.core.verdict import Response, Verdict
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.proposers.expressions import experiment, source, variation
from mxjax.discovery.proposers.expressions.grammar import Grammar, Node
from mxjax.discovery.proposers.expressions.variation import Draws

NAME = "expressions-v1"
PREFIX = "tree:"
"""Of the labels of trees, so that none is taken for a card."""
OPERATORS = ("card", "fresh", "cross", "cross", "mutate", "mutate", "mutate", "mutate")
DRAWN, TRIES = 6, 64
"""Edits among which a proposal is chosen, and the most draws to find them."""


@dataclasses.dataclass(frozen=True)
class _Edit:
  """A tree for a hook, and the parent's own if it is one."""

  before: Node | None
  after: Node

  @property
  def label(self) -> str:
    return PREFIX + self.after.text


class ExpressionProposer:
  """Proposes trees of a grammar, and now and then one of the task's edit cards."""

  def __init__(
    self,
    grammar: Grammar,
    interface: Interface,
    templates: Sequence[EditTemplate],
    target: str,
    *,
    amended: Callable[[EditTemplate], EditTemplate] = lambda template: template,
  ) -> None:
    """Takes a task's grammar and interface, its cards, and the observable to lower.

    `amended` changes the registered accounts and controls of every tree.
    """
    self._amended = amended
    self._grammar, self._interface, self._target = grammar, interface, target
    self._cards = EmbeddedProposer(templates, target)
    frozen = identity.digest([fingerprint(templates), grammar.fingerprint])
    self.name = f"{NAME}:{frozen[:12]}"

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`."""
    demand = next((d for d in context.demands if not d.forbids), None)
    is_ours = demand is None or demand.label.startswith(PREFIX)
    draws = Draws(context.seed, *context.address, len(context.history), "trees")
    operator = draws.pick(OPERATORS)
    if operator == "card" or not is_ours:
      try:
        return self._cards.propose(context)
      except ExhaustedError:
        operator = "fresh"
    own = source.trees(context.parent.source, self._grammar, self._interface)
    if context.evidence == "none":
      return self._blind(context, draws)
    if demand is not None and _repeats(demand):
      tree = self._grammar.parse(demand.label.removeprefix(PREFIX), _hook(demand.label))
      return self._proposal([_Edit(None, tree)], context)
    edits = self._drawn(operator, own, self._hooks(context, demand), context, draws)
    if not edits:
      raise ExhaustedError("no tree was drawn that was not tried on this parent")
    values = _values(context)
    score = lambda edit: (_score(edit, values, context), edit.label)
    return self._proposal([max(edits, key=score)], context)

  def _hooks(self, context: Context, demand: Demand | None) -> list[str]:
    """Returns the hooks that an edit may change: all, or those that a demand names."""
    wanted: set[str] = set()
    if context.evidence == "verdict":
      wanted = set(demand.computation) if demand else set()
      for ban in context.demands:
        if ban.forbids and (
          context.parent.full_call.part(ban.computation) == ban.intervention
        ):
          wanted = set(ban.computation)
    return [h for h in self._grammar.hooks if h in wanted] or [*self._grammar.hooks]

  def _drawn(
    self,
    operator: str,
    own: Mapping[str, Node],
    hooks: Sequence[str],
    context: Context,
    draws: Draws,
  ) -> list[_Edit]:
    """Returns distinct edits that were not yet tried on this parent."""
    tried = {e.label for e in context.history if e.parent == context.parent.id}
    donors = [
      source.trees(record.source, self._grammar, self._interface)
      for record in (context.champion, *context.donors)
    ]
    edits: dict[str, _Edit] = {}
    for _ in range(TRIES):
      hook = draws.pick(hooks)
      edit = _Edit(own.get(hook), self._varied(operator, hook, own, donors, draws))
      if edit.after != edit.before and edit.label not in tried:
        edits[edit.label] = edit
      if len(edits) == DRAWN:
        break
    return [*edits.values()]

  def _varied(
    self,
    operator: str,
    hook: str,
    own: Mapping[str, Node],
    donors: Sequence[Mapping[str, Node]],
    draws: Draws,
  ) -> Node:
    tree, others = own.get(hook), [d[hook] for d in donors if hook in d]
    if operator == "fresh" or tree is None:
      return variation.fresh(self._grammar, hook, draws)
    if operator == "cross" and others:
      mixed = variation.crossed(self._grammar, tree, draws.pick(others), draws)
      if mixed != tree:
        return mixed
    return variation.mutated(self._grammar, tree, draws)

  def _blind(self, context: Context, draws: Draws) -> Proposal:
    """Draws trees without a look at the history, for several hooks with restarts."""
    hooks = identity.shuffled(self._grammar.hooks, *draws.address, "hooks")
    count = draws.pick(range(1, len(hooks) + 1)) if context.restarts else 1
    trees = (variation.fresh(self._grammar, hook, draws) for hook in hooks[:count])
    return self._proposal([_Edit(None, tree) for tree in trees], context)

  def _proposal(self, edits: Sequence[_Edit], context: Context) -> Proposal:
    """Applies all edits to the parent; the experiment is that of the first."""
    text, first = context.parent.source, edits[0]
    for edit in edits:
      text = source.applied(text, self._grammar, self._interface, edit.after)
    template = experiment.register(
      self._grammar,
      self._interface,
      self._target,
      first.before,
      first.after,
      variation.changed(first.before, first.after),
    )
    template = self._amended(template)
    return Proposal(
      source=text,
      label="+".join(edit.label for edit in edits),
      note=template.statement,
      residual=template.residual,
      explanations=template.explanations,
      controls=template.controls,
      declared=template.hooks,
    )


def _repeats(demand: Demand) -> bool:
  """Returns whether a demand asks for another control of the same intervention."""
  return demand.response == Response.ADD_DISCRIMINATOR and bool(demand.survivors)


def _hook(label: str) -> str:
  return id_of(label).removeprefix(PREFIX)


def _words(text: str) -> set[tuple[str, str]]:
  """Returns what a tree is made of, within its hook."""
  parts = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
  return {(parts[0], part) for part in parts}


def _values(context: Context) -> dict[tuple[str, str], list[float]]:
  """Returns what earlier trees with each word brought, as far as the arm may read."""
  found: dict[tuple[str, str], list[float]] = defaultdict(list)
  for past in context.history:
    if past.label.startswith(PREFIX) and (past.status == "ok" or past.proxy):
      for word in _words(past.label.removeprefix(PREFIX)):
        found[word].append(_worth(past, context))
  return found


def _worth(past: Experiment, context: Context) -> float:
  worth = 1.0 if past.gain else -1.0
  if past.shown:
    # What a control shows on another text stands in the place of the score.
    worth = {"down": 1.0, "same": 0.0, "up": -1.0}[past.shown]
  if past.proxy is not None:
    # A tenth less is as good as a gain; a program that is much worse is no worse yet.
    worth = worth / 2 + min(max(10 * (1 - past.proxy), -1.0), 1.0)
  if context.evidence == "verdict":
    # A part that a control bore out goes first, one that it unmasked goes last.
    worth += (past.verdict == Verdict.SUPPORTED) - (past.verdict == Verdict.TARGET_ONLY)
  return worth


def _score(
  edit: _Edit, values: Mapping[tuple[str, str], list[float]], context: Context
) -> float:
  """Returns the mean worth of an edit's words, more for words that are rare."""
  words = _words(edit.after.text)
  known = [values.get(word, []) for word in sorted(words)]
  means = [(sum(past) + 1.0) / (len(past) + 1) for past in known]
  where = (context.seed, *context.address, edit.label, "explore")
  return sum(means) / len(means) + 0.1 * identity.draw(*where)
