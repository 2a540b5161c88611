"""Builds the prompt for a language model from an allow-list, within a token budget.

Paper: Appendix "Reflection prompt and memory". Memory keeps the best candidate, the
latest 20 experiments, up to 16 failed directions and up to 16 successful mechanisms.
When it exceeds its allowance, it merges duplicates first and then drops the least
relevant of the older entries; failures are not dropped before others.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from mxjax.discovery.core.proposal import Context, Experiment
from mxjax.discovery.core.task import Task

INPUT_TOKENS = 65_536
MEMORY_TOKENS = 16_384
LATEST, FAILURES, MECHANISMS = 20, 16, 16

Count = Callable[[str], int]

REFLECTION = (
  "Set this round beside its parent and the experiments most like it, those that "
  "worked and those that failed. Keep what was observed apart from what you infer. "
  "List modifications already rejected and under which conditions. Make one code "
  "change that this comparison speaks for; say what it should improve and how it may "
  "fail. To return to a rejected direction, say what is different now."
)


def estimated_tokens(text: str) -> int:
  """Bounds the token count of common tokenizers from above: three bytes per token."""
  return -(-len(text.encode()) // 3)


def tokenizer_count(path: str | pathlib.Path) -> Count:
  """Returns an exact token counter that uses a `tokenizer.json`."""
  from tokenizers import Tokenizer

  tokenizer = Tokenizer.from_file(str(path))
  return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def entry_text(experiment: Experiment) -> str:
  """Renders an experiment as one line of memory."""
  changes = ", ".join(f"{k} {v:+.4g}" for k, v in sorted(experiment.changes.items()))
  parts = [
    f"[{experiment.program[:8]} from {experiment.parent[:8]}] {experiment.label}",
    f"status {experiment.status}; {'gain' if experiment.gain else 'no gain'}",
    changes,
    experiment.note,
  ]
  if experiment.verdict:
    parts.append(
      f"verdict {experiment.verdict} ({experiment.reason}); excluded "
      f"{', '.join(experiment.excluded) or 'none'}; left "
      f"{', '.join(experiment.survivors) or 'none'}"
    )
  if experiment.implemented is not None:
    parts.append(f"response {'' if experiment.implemented else 'not '}implemented")
  return "; ".join(part for part in parts if part)


def _merged(entries: Sequence[Experiment]) -> list[Experiment]:
  """Merges entries of one edit with the same result into the latest, with a count."""
  groups: dict[tuple[str, str, bool, str], list[Experiment]] = {}
  for entry in entries:
    key = (entry.label, entry.status, entry.gain, entry.verdict)
    groups.setdefault(key, []).append(entry)
  merged = []
  for group in groups.values():
    note = group[-1].note + (f" (seen {len(group)} times)" if len(group) > 1 else "")
    merged.append(dataclasses.replace(group[-1], note=note))
  return merged


def _relevance(entry: Experiment, context: Context) -> tuple[bool, float]:
  """Ranks entries of the same parent first, then by the size of the target's change."""
  change = abs(entry.changes.get(context.target, 0.0))
  return entry.parent == context.parent.id, change


def select(
  context: Context, allowance: int = MEMORY_TOKENS, count: Count = estimated_tokens
) -> list[Experiment]:
  """Returns the experiments in memory, in order, within `allowance` rendered tokens."""
  history = list(context.history)
  gains = [e for e in history if e.gain]
  best = min(gains, key=lambda e: e.changes.get(context.target, 0.0), default=None)
  failures = [e for e in history if not e.gain][-FAILURES:]
  wanted = {id(e) for e in (*history[-LATEST:], *failures, *gains[-MECHANISMS:])}
  if best is not None:
    wanted.add(id(best))
  entries = [e for e in history if id(e) in wanted]
  size = lambda: sum(count(entry_text(e) + "\n") for e in entries)
  if size() > allowance:
    entries = _merged(entries)
  while entries and size() > allowance:
    older = entries[: max(len(entries) - LATEST, 1)]
    entries.remove(min(older, key=lambda e: _relevance(e, context)))
  return entries


SYSTEM = (
  "You revise a JAX program to lower one measured target. The program is one "
  "module: imports of jax, jax.numpy, jax.lax, numpy, math, functools; a literal "
  "PLAN; pure hooks that are traced once and compiled. Answer with one JSON object: "
  "source (the whole module), label, note, residual (an observable, or null), "
  "explanations (the focal one first; each with name, statement and predictions: "
  "condition -> observable -> down|same|up relative to the parent, where the "
  "condition `primary` is your program as it is), controls (name, intervention, "
  "cost, statement) that tell the explanations apart, and declared (the hooks or "
  "PLAN keys you changed).\n"
)


def _system(task: Task) -> str:
  hooks = "\n".join(
    f"- {h.name}({', '.join(h.arguments)}): {h.doc}" for h in task.interface.hooks
  )
  return (
    f"{SYSTEM}Hooks:\n{hooks}\nPLAN: {dict(task.interface.plan)}\n"
    f"Interventions for controls: {dict(task.interventions)}\nMargins below which a "
    f"change is `same`: {dict(task.margins)}"
  )


def _question(context: Context) -> list[str]:
  """Returns the current question, as far as the arm's evidence allows."""
  parts = [
    f"Target to lower: {context.target}.",
    f"Measured: {dict(context.parent.values)}",
    f"Program:\n{context.parent.source}",
  ]
  if context.evidence == "reflect":
    parts.append(REFLECTION)
  if context.evidence == "verdict":
    questions = [f"{r.observable} = {r.value:.4g}" for r in context.residuals]
    parts.append(f"Open residuals: {', '.join(questions) or 'none'}")
    if (demand := context.required) is not None:
      parts.append(
        f"Required response: {demand.response}, because {demand.label} was "
        f"{demand.verdict} on {demand.residual.observable} (left standing: "
        f"{demand.survivors}). Change the computation {demand.residual.computation} "
        "accordingly and declare it."
      )
  return parts


def messages(
  context: Context, task: Task, *, count: Count = estimated_tokens
) -> list[dict[str, str]]:
  """Returns the chat messages that request one proposal.

  Raises:
    ValueError: The program and the instructions alone exceed the input budget.
  """
  system, parts = _system(task), _question(context)
  fixed = count(system) + sum(map(count, parts))
  if fixed > INPUT_TOKENS:
    raise ValueError(
      f"prompt: the program and instructions take {fixed} tokens of {INPUT_TOKENS}; "
      "shorten the program."
    )
  entries = select(context, min(MEMORY_TOKENS, INPUT_TOKENS - fixed), count)
  memory = "\n".join(entry_text(entry) for entry in entries)
  user = "\n\n".join([*parts, f"Experiments so far:\n{memory or 'none'}"])
  return [{"role": "system", "content": system}, {"role": "user", "content": user}]
