"""Builds the prompt for a language model from an allow-list, within a token budget.

Paper: Appendix "Reflection prompt and memory". Memory keeps the champion, the latest 20
experiments, up to 16 failed directions and up to 16 successful mechanisms; residuals,
demands, donors and what packets registered and showed count towards its allowance.
When it exceeds its allowance, it merges duplicates first and then drops the least
relevant of the older entries; failures are not dropped before others.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from mxjax.discovery.core.proposal import Context, Demand, Experiment, Record
from mxjax.discovery.core.task import Task
from mxjax.discovery.core.verdict import Response

INPUT_TOKENS = 65_536
MEMORY_TOKENS = 16_384
LATEST, FAILURES, MECHANISMS = 20, 16, 16

Count = Callable[[str], int]

REFLECTION = (
  "Compare this round with its parent and the most relevant successful and failed "
  "experiments. Distinguish observations from causal inferences. Record rejected "
  "modifications and the conditions under which they were rejected. Propose one code "
  "change supported by these historical comparisons, and explain its expected benefit "
  "and possible failure modes. If revisiting a rejected direction, explain how the new "
  "conditions differ."
)
"""The paper's instruction to ReflectMem, as printed there."""

RESPONSES: Mapping[str, str] = {
  Response.EXTEND: "extend or compose the direction there",
  Response.REPAIR_EXPLANATION: "repair the explanation: change the computation and "
  "register a focal account that the verdict did not exclude",
  Response.REPAIR_TRANSFER: "repair transfer to the target: change the computation and "
  "predict that the target goes down",
  Response.RETIRE: "retire the intervention: leave the computation as before it, or "
  "make it execute something else",
  Response.ADD_DISCRIMINATOR: "add a discriminator: repeat the edit, register what is "
  "left standing by the same names and a new control under which two of them predict "
  "differently; if nothing is left, change the computation and register a new account",
  Response.REJECT: "reject it: do not bring it back",
}
"""What each response asks of the next program; checks look for exactly this."""


def estimated_tokens(text: str) -> int:
  """Bounds the token count of common tokenizers from above: three bytes per token."""
  return -(-len(text.encode()) // 3)


def tokenizer_count(path: str | pathlib.Path) -> Count:
  """Returns an exact token counter that uses a `tokenizer.json`."""
  from tokenizers import Tokenizer

  tokenizer = Tokenizer.from_file(str(path))
  return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _table(conditions: Mapping[str, Mapping[str, str]]) -> str:
  """Renders symbols by condition and observable."""
  cells = lambda row: ", ".join(f"{k} {v}" for k, v in sorted(row.items()))
  return "; ".join(f"{name}: {cells(row)}" for name, row in conditions.items())


def entry_text(experiment: Experiment) -> str:
  """Renders an experiment for memory, with whatever its arm may see of it.

  A packet shows what each account predicted, what its conditions showed of that, what
  this excluded by which condition, and what is left.
  """
  e = experiment
  parts = [
    f"[{e.program[:8]} from {e.parent[:8]}] {e.label}",
    f"status {e.status}; {'gain' if e.gain else 'no gain'}",
    "" if e.transfers is None else f"transfer {'' if e.transfers else 'not '}accepted",
    "" if e.score is None else f"score {e.score:.6g}",
    "" if e.proxy is None else f"proxy {e.proxy:.4g} of its parent's",
    ", ".join(f"{k} {v:+.4g}" for k, v in sorted(e.changes.items())),
    e.feedback,
    e.note,
  ]
  if e.implemented is not None:
    parts.append(f"response {'' if e.implemented else 'not '}implemented")
  lines = ["; ".join(part for part in parts if part)]
  lines += [
    f"  {account.name} ({account.statement}) predicts {_table(account.predictions)}"
    for account in e.explanations
  ]
  asked = {o for a in e.explanations for row in a.predictions.values() for o in row}
  seen = {
    c: {o: s for o, s in row.items() if o in asked} for c, row in e.observed.items()
  }
  if e.verdict:
    gone = [f"{name} by {condition}" for name, condition in e.excluded.items()]
    lines.append(f"  observed {_table(seen)}")
    lines.append(
      f"  verdict {e.verdict} ({e.reason}); excluded {', '.join(gone) or 'none'}; left "
      f"{', '.join(e.survivors) or 'none'}"
    )
  return "\n".join([*lines, e.diff] if e.diff else lines)


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
  best = next((e for e in history if e.program == context.champion.id), None)
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
  """Returns code, objective and diagnostics, as far as the arm's evidence allows."""
  measured = dict(context.parent.values)
  if context.evidence in ("none", "score"):
    measured = {context.target: measured[context.target]}
  parts = [
    f"Target to lower: {context.target}.",
    f"Measured: {measured}",
    f"Program:\n{context.parent.source}",
  ]
  if context.evidence == "reflect" or not context.compiles:
    parts.append(REFLECTION)
  return parts


def _demand_text(demand: Demand) -> str:
  return (
    f"Required response: {RESPONSES[demand.response]}. {demand.label} was "
    f"{demand.verdict} on {demand.residual.observable} (left standing: "
    f"{', '.join(demand.survivors) or 'none'}). The computation is "
    f"{', '.join(demand.computation)}; declare what you change of it."
  )


def _program_text(record: Record, context: Context, what: str) -> str:
  told = f"{what} {record.id[:8]}, {context.target} {record.values[context.target]:.6g}"
  if record.id == context.parent.id:
    return f"{told}: the program above."
  return f"{told}:\n{record.source}"


def memory(
  context: Context, allowance: int = MEMORY_TOKENS, count: Count = estimated_tokens
) -> str:
  """Returns the memory section, within `allowance` tokens.

  Demands and residuals come first, then the champion, stagnation, and donors in at most
  half of what is left; experiments take the rest. What does not fit is counted.
  """
  if context.evidence == "none":
    return "Experiments so far:\nnone"
  left, shown = allowance - count(f"{_LEFT_OUT.format(10**6, 'programs')}\n") * 2, []

  def add(texts: Sequence[str], what: str, limit: int) -> None:
    nonlocal left
    used = 0
    for number, text in enumerate(texts):
      if used + (cost := count(text + "\n\n")) > limit:
        shown.append(_LEFT_OUT.format(len(texts) - number, what))
        break
      shown.append(text)
      used += cost
    left -= used

  if context.evidence == "verdict":
    questions = [f"{r.observable} = {r.value:.4g}" for r in context.residuals]
    texts = [_demand_text(demand) for demand in context.demands]
    texts.append(f"Open residuals: {', '.join(questions) or 'none'}")
    add(texts, "demands and residuals", left)
  best = _program_text(context.champion, context, "Best program")
  stagnation = f"Experiments since the best program improved: {context.stagnation}"
  others = [r for r in context.donors if r.id != context.champion.id]
  donors = [_program_text(record, context, "Donor") for record in others]
  add([stagnation, best], "programs", left)
  add(donors, "donors", left // 2)
  head = "Experiments so far:"
  entries = select(context, max(left - count(head + "\n"), 0), count)
  told = "\n".join(entry_text(entry) for entry in entries)
  return "\n\n".join([*shown, f"{head}\n{told or 'none'}"])


_LEFT_OUT = "({} more {} do not fit into memory.)"


def messages(
  context: Context, task: Task, *, count: Count = estimated_tokens, reserve: int = 0
) -> list[dict[str, str]]:
  """Returns the chat messages that request one proposal.

  `reserve` is the number of tokens that later messages of the same request need.

  Raises:
    ValueError: The program and the instructions alone exceed the input budget.
  """
  system, parts = _system(task), "\n\n".join(_question(context))
  fixed = count(system) + count(parts + "\n\n") + reserve
  least = count(f"{_LEFT_OUT.format(10**6, 'programs')}\n") * 3
  if fixed + least > INPUT_TOKENS:
    raise ValueError(
      f"prompt: the program and instructions take {fixed} tokens of {INPUT_TOKENS}; "
      "shorten the program."
    )
  told = memory(context, min(MEMORY_TOKENS, INPUT_TOKENS - fixed), count)
  user = f"{parts}\n\n{told}"
  return [{"role": "system", "content": system}, {"role": "user", "content": user}]
