"""Builds the prompt for a language model from an allow-list, within a token budget.

Paper: Appendix "Reflection prompt and memory". Memory keeps the champion, the latest 20
experiments, up to 16 failed directions and up to 16 successful mechanisms; residuals,
demands, lineage and what packets registered and showed count towards its allowance.
When it exceeds its allowance, it merges duplicates first and then drops the least
relevant of the older entries; failures are not dropped before others.
"""

import ast
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import candidate_source as limits
from mxjax.discovery.core import interventions
from mxjax.discovery.core.interface import Hook, Interface
from mxjax.discovery.core.proposal import (
  QUESTION_CALLS,
  WITH_QUESTIONS,
  Context,
  Demand,
  Experiment,
  Winner,
)
from mxjax.discovery.core.residual import OTHER_TEXT, Residual
from mxjax.discovery.core.task import Task
from mxjax.discovery.core.verdict import Response
from mxjax.errors import ValueRefusal

# The paper's allowances: all input of a call, and the part of it that is memory.
INPUT_TOKENS = 65_536
MEMORY_TOKENS = 16_384
LATEST, FAILURES, MECHANISMS = 20, 16, 16
SERIES = 8
"""Numbered observables, such as layers, up to which each is told by its name."""
ROWS = 8
"""Rows of a table of parts up to which each cell has its column's name."""
START = "parent"
"""The condition, in the table of what was measured, of a parent that has no row."""

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
  Response.EXTEND: "extend the supported edit or compose it with more",
  Response.REPAIR_EXPLANATION: "repair the explanation: change the computation, and "
  "register first an account that the verdict did not exclude: one that it left "
  "standing, or a new one, of another name or in other words",
  Response.REPAIR_TRANSFER: "repair transfer to the target: change the computation and "
  "predict that the target goes down",
  Response.RETIRE: "retire the intervention: leave the computation as before it, or "
  "make a change there that matters",
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


def _series(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
  """Parts what is numbered, such as `layer_0` to `layer_29`, from the rest.

  Returns the rest, and the names of each long series in the order of their numbers.
  """
  found: dict[str, list[tuple[int, str]]] = {}
  for name in values:
    if match := re.fullmatch(r"(.*_)(\d+)", name):
      found.setdefault(match[1], []).append((int(match[2]), name))
  long = {k: [n for _, n in sorted(v)] for k, v in found.items() if len(v) > SERIES}
  members = {name for names in long.values() for name in names}
  return {k: v for k, v in values.items() if k not in members}, long


def _changes(values: Mapping[str, float], changes: Mapping[str, float]) -> list[str]:
  """Renders the changes that no table holds; of a long series, their ends."""
  rest, long = _series(changes)
  # What has a value is in the table of what was measured.
  shown = [f"{k} {v:+.4g}" for k, v in sorted(rest.items()) if k not in values]
  for names in long.values():
    of = lambda name: changes[name]
    low, high = min(names, key=of), max(names, key=of)
    shown.append(
      f"{names[0]} to {names[-1]} from {changes[low]:+.3g} ({low}) to "
      f"{changes[high]:+.3g} ({high})"
    )
  return shown


def _measured(values: Mapping[str, float]) -> str:
  """Renders the values of a program; a long series as one row of numbers."""
  rest, long = _series(values)
  shown = [f"{k} {v:.6g}" for k, v in sorted(rest.items())]
  for names in long.values():
    row = " ".join(f"{values[name]:.3g}" for name in names)
    shown.append(f"{names[0]} to {names[-1]}: {row}")
  return ", ".join(shown)


NEW = re.compile(r"\+(?:def )?([A-Za-z_]\w*).*")
"""A line of a difference that begins a function or a constant."""
WHOLE = 2
"""Edits, the last that ran, whose functions are shown whole."""
WHOLE_UP_TO = 56_000
"""Bytes of a prompt up to which functions of earlier edits are shown whole."""
LONG = 3
"""Lines of a change up to which it is shown again rather than referred to."""


def _hunks(diff: str) -> list[tuple[str, list[str]]]:
  """Cuts a difference of `candidate_source.diff` at its heads and at new functions.

  Returns the lines of each part, with the name of what they stand in or begin.
  """
  before, *rest = re.split(r"^@@ ?(.*)\n?", diff, flags=re.MULTILINE)
  found: list[tuple[str, list[str]]] = []
  for name, body in [("", before), *zip(rest[::2], rest[1::2], strict=True)]:
    lines = body.splitlines()
    starts = [i for i, line in enumerate(lines) if NEW.fullmatch(line)]
    # What also takes lines away is one change: its new functions replace something
    # there.
    if any(line[:1] != "+" for line in lines):
      starts = []
    ends = [*starts, len(lines)]
    found.append((name, lines[: ends[0]]))
    for start, end in zip(starts, ends[1:], strict=True):
      found.append((NEW.sub(r"\1", lines[start]), lines[start:end]))
  for _, lines in found:
    while lines and lines[-1] == "+":
      lines.pop()
  return [(name, lines) for name, lines in found if lines]


def _plan_of(lines: Sequence[str], sign: str) -> dict[str, Any] | None:
  """Returns the PLAN on one side of a difference; None if it is not there whole."""
  text = "\n".join(line[1:] for line in lines if line[:1] == sign)
  try:
    plan = ast.literal_eval(text.removeprefix("PLAN = ")) if text else {}
  except (SyntaxError, ValueError):
    return None
  return plan if isinstance(plan, dict) else None


def _plan_change(lines: Sequence[str]) -> dict[str, tuple[Any, Any]] | None:
  """Returns the values of PLAN that a difference changes; None if PLAN is not whole.

  A key that one side leaves out has None there.
  """
  before, after = _plan_of(lines, "-"), _plan_of(lines, "+")
  if before is None or after is None:
    return None
  pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
  return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def edited(diff: str) -> list[str]:
  """Names the functions, constants and keys of PLAN that a difference edits."""
  names: dict[str, None] = {}
  for name, lines in _hunks(diff):
    keys = _plan_change(lines) if name == "PLAN" else None
    begun = [match[1] for line in lines if (match := NEW.fullmatch(line))]
    names |= dict.fromkeys((name, *begun) if keys is None else keys)
  return [name for name in names if name]


class Changes:
  """Shows how programs differ from their parents, and no text a second time.

  Of a program that the parent or the champion descends from, what it edited is named:
  the change itself is in a program above. A function that stands in the parent's, or in
  the change of an earlier entry, is referred to. The functions that the last `WHOLE`
  edits changed are shown whole, and so is what the last control that did better than
  its edit has in their place: a model that is to send an edit again must know it.
  """

  def __init__(self, context: Context | None = None, whole: int | None = None) -> None:
    """Starts with nothing shown but the parent's program, or not even that.

    `whole` edits are shown whole, by default `WHOLE`; with none, no control is either.
    """
    whole = WHOLE if whole is None else whole
    self._seen: dict[str, str] = {}
    self._bodies: dict[str, str] = {}
    self._contained: set[str] = set()
    self._above, self._last = "", ()
    self._whole: set[tuple[str, str]] = set()
    self._won: tuple[str, str] | None = None
    if context is None:
      return
    self._above = context.parent.source
    ran = [e for e in context.history if e.status == "ok" and e.diff]
    # By names: what is merged with its likes is another object.
    self._whole = {(e.program, e.parent) for e in ran[::-1][:whole]}
    won = [e for e in context.history if e.winner is not None]
    shown = (context.parent.id, context.champion.id)
    if whole and won and won[-1].winner and won[-1].winner.program not in shown:
      self._won = won[-1].program, won[-1].parent
    records = (context.parent, context.champion, *context.donors)
    parents = {record.id: record.parent for record in records}
    for entry in context.history:
      if entry.status == "ok":
        parents.setdefault(entry.program, entry.parent)
    self._last = (context.parent.id, context.champion.id)
    for program in self._last:
      while program in parents and program not in self._contained:
        self._contained.add(program)
        program = parents[program]

  def contains(self, experiment: Experiment) -> bool:
    """Returns whether the parent or the champion descends from a program, or is it."""
    return experiment.status == "ok" and experiment.program in self._contained

  def is_older(self, experiment: Experiment) -> bool:
    """Returns whether the parent or champion descends from a program and is not it."""
    return self.contains(experiment) and experiment.program not in self._last

  def text(self, experiment: Experiment) -> str:
    """Returns what an experiment's program changed, and remembers that it was shown."""
    told = [self._edit(experiment)] if experiment.diff else []
    is_won = (experiment.program, experiment.parent) == self._won
    if is_won and (won := experiment.winner) is not None:
      head = f"  {won.condition} did better; it is this program"
      plan = ", ".join(f"{key} {value!r}" for key, value in won.plan.items())
      told += [f"{head} with PLAN {plan}" if plan else head, *self._functions(won)]
    return "\n".join(told)

  def _edit(self, experiment: Experiment) -> str:
    is_whole = (experiment.program, experiment.parent) in self._whole
    if self.contains(experiment):
      told = f"  changed {', '.join(edited(experiment.diff))}: see the programs above"
      # What a later edit changed again is in none of them.
      is_gone = is_whole and experiment.program not in self._last
      return "\n".join([told, *(self._functions(experiment) if is_gone else [])])
    hunks = [
      self._hunk(name, lines, experiment.program)
      for name, lines in _hunks(experiment.diff)
      if not (is_whole and name in experiment.code)
    ]
    return "\n".join([*hunks, *(self._functions(experiment) if is_whole else [])])

  def _functions(self, shown: Experiment | Winner) -> list[str]:
    """Returns the functions of an edit whole, unless they were shown before."""
    lines = []
    for name, text in shown.code.items():
      if text in self._above:
        lines.append(f"@@ {name}: as in the program above")
      elif (first := self._bodies.setdefault(text, shown.program)) != shown.program:
        lines.append(f"@@ {name}: as in {first[:8]}")
      else:
        # As a change, so that a later one that is the same refers to it.
        self._seen.setdefault("\n".join(f"+{li}" for li in text.splitlines()), first)
        lines.append(f"@@ {name}, whole\n{text}")
    return lines

  def _hunk(self, name: str, lines: Sequence[str], program: str) -> str:
    if all(line[:1] == "+" for line in lines):
      self._bodies.setdefault("\n".join(line[1:] for line in lines), program)
    head, text = f"@@ {name}".rstrip(), "\n".join(lines)
    if name == "PLAN" and (keys := _plan_change(lines)) is not None:
      shown = [f"{key} {old!r} to {new!r}" for key, (old, new) in keys.items()]
      return f"{head}: {', '.join(shown)}"
    if len(lines) > LONG:
      bare = "\n".join(line[1:] for line in lines)
      if bare in self._above and all(line[:1] == "+" for line in lines):
        return f"{head}: added, as in the program above"
      if (first := self._seen.setdefault(text, program)) != program:
        return f"{head}: as in {first[:8]}"
    return f"{head}\n{text}"


def entry_text(experiment: Experiment, changes: Changes | None = None) -> str:
  """Renders an experiment for memory, with whatever its arm may see of it.

  A packet shows what each account predicted, what became of every control that did not
  succeed, what the observations excluded by which condition, what is left and asked of
  later programs, and why an answer to a demand counted or did not. The values of its
  program and of its controls are rows of `measurements`. A program that the parent or
  the champion descends from has its words, what it changed and its verdict alone.
  """
  changes = changes or Changes()
  e, is_older = experiment, changes.is_older(experiment)
  moved = _changes(e.values, e.changes)
  parts = [
    f"[{e.program[:8]} from {e.parent[:8]}] {e.label}",
    f"status {e.status}; {'gain' if e.gain else e.short or 'no gain'}",
    "" if e.transfers is None else f"transfer {'' if e.transfers else 'not '}accepted",
    "" if e.score is None or e.values else f"score {e.score:.6g}",
    ", ".join(moved),
    e.feedback,
    e.dropped,
    e.note,
  ]
  lines = ["; ".join(part for part in parts if part)]
  lines += [
    f"  {account.name} ({account.statement}) predicts {_table(account.predictions)}"
    for account in e.explanations
    if not is_older
  ]
  asked = {o for a in e.explanations for row in a.predictions.values() for o in row}
  seen = {
    c: {o: s for o, s in row.items() if o in asked} for c, row in e.observed.items()
  }
  lines += [
    f"  {ran.condition}: {ran.status}{'; ' if ran.detail else ''}{ran.detail}"
    for ran in e.ran
    if not ran.values and not is_older
  ]
  if e.verdict:
    gone = [f"{name} by {condition}" for name, condition in e.excluded.items()]
    if not is_older:
      lines.append(f"  observed {_table(seen)}")
    lines.append(
      f"  verdict {e.verdict} ({e.reason}); excluded {', '.join(gone) or 'none'}; left "
      f"{', '.join(e.survivors) or 'none'}" + (f"; asks {e.asks}" if e.asks else "")
    )
  for made in e.answered:
    counted = {True: "implemented", False: "not implemented", None: "not decided"}
    lines.append(
      f"  response {made.response} ({made.about}) {counted[made.implemented]}: "
      f"{made.detail}"
    )
  return "\n".join([*lines, change] if (change := changes.text(e)) else lines)


def measurements(experiments: Sequence[Experiment]) -> str:
  """Returns a table of what was measured: a row a program, and a row a control of it.

  A parent that is no program of the table has a row of its own before the first that
  revises it. Long series, such as layers, are left out.
  """
  rows: dict[tuple[str, str], Mapping[str, float]] = {}
  known = {e.program[:8] for e in experiments if e.values}
  for e in experiments:
    name, parent = e.program[:8], e.parent[:8]
    before = {k: e.values[k] - v for k, v in e.changes.items() if k in e.values}
    if before and parent not in known:
      rows.setdefault((parent, START), before)
    for condition, values in (
      ("", e.values),
      *((r.condition, r.values) for r in e.ran),
    ):
      if values:
        rows.setdefault((name, condition), _series(values)[0])
  columns = sorted({name for row in rows.values() for name in row})
  if not columns:
    return ""
  cells = lambda row: " ".join(f"{row[c]:.4g}" if c in row else "-" for c in columns)
  lines = [
    f"{name}{f' {condition}' if condition else ''}: {cells(row)}"
    for (name, condition), row in rows.items()
  ]
  return "\n".join([f"program or control of it: {' '.join(columns)}", *lines])


def _entries_text(
  entries: Sequence[Experiment], context: Context, whole: int | None = None
) -> str:
  changes = Changes(context, whole)
  return "\n".join(entry_text(entry, changes) for entry in entries)


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
  context: Context,
  allowance: int = MEMORY_TOKENS,
  count: Count = estimated_tokens,
  whole: int | None = None,
) -> list[Experiment]:
  """Returns the experiments in memory, in order, within `allowance` rendered tokens."""
  history = list(context.history)
  gains = [e for e in history if e.gain]
  best = next((e for e in history if e.program == context.champion.id), None)
  failures = [e for e in history if not e.gain][-FAILURES:]
  # By object, because experiments hold mappings and have no hash.
  wanted = {id(e) for e in (*history[-LATEST:], *failures, *gains[-MECHANISMS:])}
  if best is not None:
    wanted.add(id(best))
  entries = [e for e in history if id(e) in wanted]
  size = lambda: (
    count(_entries_text(entries, context, whole)) + count(measurements(entries))
  )
  if size() > allowance:
    entries = _merged(entries)
  while entries and size() > allowance:
    # The latest are kept, unless there are no others.
    older = entries[: max(len(entries) - LATEST, 1)]
    entries.remove(min(older, key=lambda e: _relevance(e, context)))
  return entries


INTRODUCTION = """\
You revise one program to lower one measured target. The program is a Python module:
imports of jax, jax.numpy, jax.lax, numpy, math, functools; constants; a literal PLAN;
and pure hooks, each of which is traced once for abstract arrays of the shapes below and
then compiled. Every hook and every key of PLAN that the module leaves out has its
default. A hook sees one unit (a row, a block, a head, a linear) and nothing else, and
must return arrays of exactly the declared shapes and dtypes; float64 is enabled. Branch
on values with jnp.where, jax.lax.cond or jax.lax.switch, and loop with
jax.lax.fori_loop: Python's `if` on a traced value fails. Of linear algebra, eigh, qr,
cholesky, svd, inv, solve and pinv of jnp.linalg, jax.lax.linalg.triangular_solve and
jax.scipy.linalg by its full name work in every hook, batched or not. Refused are eig,
complex numbers, callbacks, classes, `try`, `with` and every other import."""
ANSWER = """\
Answer with one JSON object. Text around it is passed over.
- "label": a short name of the edit; "note": why it should help.
- "code": the functions that you change or add, whole; they are merged by name into the
  program below: a function of a name that is there takes its place, any other is added,
  and the rest of the program stays. Instead of "code" you may put them into one
  ```python fence after the object, unescaped. "plan": the values of PLAN that you
  change, such as {plan}. Or, instead of both, "source": the whole module.
- "declared": the hooks and PLAN keys that you change. Where you change a helper or a
  constant alone, write its name, which stands for every hook that uses it, or the names
  of those hooks that are to answer a demand. Left out, it is all that differs.
- "finished": true, with a "note" that says why and without "code", "plan" and "source",
  where you judge that no edit that you can think of would lower the target by more than
  its margin. It ends the run, and calls that are left are not spent."""
ASKING = """
- "ask": "all" or the name of a part, such as a linear: nothing runs, and the free
  proxy's errors of your program there come back, beside those of the parent; then you
  answer again. At most twice a proposal."""
QUESTION = """
- "residual": the observable that the edit is about, one of those that are listed below
  as open to a question. An observable is open to a question while it is above its
  threshold on the parent and no verdict has settled it, and while a demand is about it.
  A program is put to the test with the accounts of why it should help: null is for
  rounds in which nothing is open to a question, or in which fewer than {least} calls
  are left.
- "explanations": two accounts or more of why it should help, yours first; each has
  "name", "statement" and "predictions", as in
  {{"primary": {{"{target}": "down"}}, "c": {{"{target}": "lost"}}}}: condition,
  observable, symbol. `primary` is your program as it is; other conditions are the names
  of your controls.
- "controls": each with "name", "intervention" and "statement". A name is not `primary`,
  begins with neither `probe` nor `rival: ` and does not end in ` of the parent`: the
  evaluator names conditions of its own so. Exact forms of an
  intervention, with an example each (the evaluator adds the parent and sets the cost):
{interventions}
  A control of kind `program` has either `without`, or else `code`, `plan` or both, as
  in {{"kind": "program", "code": "def ..."}}. Its `code` is merged by name into YOUR
  program, not into the parent: its functions take the place of yours, and your helpers
  stay; so it may replace a helper alone. A control names hooks by `without`, `hooks`
  and such values, and what it names is the part of the edit that your first account
  credits; `code` names none, and where no control names one, that is the whole edit.
  Every control that runs shows all observables with a margin, the target too{except_}.
Rules of a question:
1. Symbols: down, same, up compare a condition with the PARENT, named below with its
   values; a change within the margin is `same`. kept, lost, gone, reversed compare a
   control with YOUR PROGRAM, where that moved the observable by more than its margin:
   lost - it is worse under the control than in your program by more than its margin, so
   a share of your change goes with what was taken away; kept - it is not; gone - at
   most a margin of your change from the parent is left (lost, too); reversed - it is
   worse than in the PARENT by more than its margin (gone and lost, too). "Worse" is
   back the way that your change came. Two parts may each have a share, so an ablation
   asks lost or kept, and gone only where nothing else may carry a share.{again}
   The two kinds of symbol are not compared with each other, and `primary` takes down,
   same and up only.
   An edit of two parts is asked by an ablation: a control of kind `program` that takes
   one part away, lost for the account that credits it, kept for that which credits the
   other alone. A control tells accounts apart only if it takes away what one of them
   needs and the other does not.
2. Accounts should agree about `primary`, or else the run alone decides and no control
   is worth a call; a question is sent back if every other account denies what yours
   predicts there. Every pair must differ, in the same observable, under some control
   or under `primary`. An account that says nothing of an observable under a control is
   told from no other by it, and such a question is sent back.
3. Only observables with a margin can be predicted, and one failed prediction removes
   its account: predict what the account needs and no more.
4. The cheapest controls that tell all accounts apart are run, at the calls said beside
   each, and only if the primary run leaves something to tell. Accounts of ours stand
   beside yours where they apply, with a control of their own, so that a verdict
   `supported` needs a gain of the target that none of them explains: {rivals}.
   So a question is reserved 1 call for the candidate, those of its own controls and
   those of ours, and what turns out not to be needed is given back. If more is reserved
   than is left, the candidate runs without its question, and you are told so."""
AGAIN = """
   {kinds} takes nothing away and measures your change a second time, where a smaller
   one is expected: there kept means that more than half of it shows."""
"""What `kept` means under controls that measure the whole edit again."""
BINDING = """
5. The verdict asks something of the next programs: supported - extend it; target_only
   (a gain for another reason) - change the account, to a new one or one that is left;
   mediator_only (the observable, not the target) - carry it to the target; no_effect
   - leave it out; unresolved - a control
   that tells the rest apart; unsafe - do not repeat it. An observable that is at its
   floor is not to be extended.
6. A response counts if it moves the observable that the demand is about by more than
   its margin; an edit that moves nothing meets nothing. The question of the same answer
   may be about any observable that is open to one. Nothing has to reach a threshold:
   below it the question is closed, and that is all. A change within its margin owes
   nothing: an edit that gains a little stays, and you go on from it. A demand that two
   answers leave for something else is dropped."""
"""Rules of a question for arms whose verdicts bind later programs."""
ANOTHER_PART = (
  "`another part of the edit` (1 call), where the edit changes hooks that your "
  "controls do not name: your program without the ones that they name. It is excluded "
  "if {target} is worse there than in your program by more than its margin, so two "
  "parts may each have a share"
)
"""The account of ours that every task has, as the rules of a question name it."""


def check_described(task: Task) -> None:
  """Refuses a task that a language model could not be told.

  Raises:
    ValueError: A description, or the meaning of something, is absent.
  """
  hooks = task.interface.hooks
  absent = [
    *([] if task.description else ["a description"]),
    *(f"the doc of the hook {hook.name}" for hook in hooks if not hook.doc),
    *(
      f"what the plan key {key} decides"
      for key in task.interface.plan
      if key not in task.interface.plan_docs
    ),
    *(f"what {name} means" for name in task.margins if _meaning(name, task) is None),
  ]
  if absent:
    raise ValueRefusal(
      "task",
      expected="words for a language model",
      got=f"none for {', '.join(absent)}",
      mend="write DESCRIPTION, OBSERVABLES, PLAN_DOCS and `doc` in evaluate.py, or "
      "the attributes `description` and `observables` of the task's class",
    )


def _meaning(observable: str, task: Task) -> str | None:
  """Returns what an observable means; `layer_3` has the words of `layer_N`."""
  return task.observables.get(observable) or task.observables.get(
    re.sub(r"\d+$", "N", observable)
  )


def _hook_text(hook: Hook) -> str:
  called = "always called"
  if hook.active_when is not None:
    key, values = hook.active_when
    called = f"called if PLAN {key} is {' or '.join(map(repr, values))}"
  return f"- {hook.signature}; {called}. {hook.doc}\nDefault:\n{hook.default.strip()}"


def _hooks_text(hooks: Sequence[Hook]) -> str:
  """Explains every hook; those that differ by their name alone are explained once."""
  alike: dict[str, list[Hook]] = {}
  for hook in hooks:
    alike.setdefault(re.sub(rf"\b{hook.name}\b", "...", _hook_text(hook)), []).append(
      hook
    )
  lines = []
  for first, *others in alike.values():
    lines.append(_hook_text(first))
    lines += [f"- {each.signature}; the same as {first.name}" for each in others]
  return "\n".join(lines)


def _observables_text(task: Task) -> str:
  """Explains every observable; those with one meaning, margin and floor at once."""
  alike: dict[str, list[str]] = {}
  for name in dict.fromkeys((*task.margins, *task.observables)):
    margin = f"margin {task.margins[name]:.3g}" if name in task.margins else "no margin"
    floors = " or ".join(f"{floor:g}" for floor in task.floors.get(name, ()))
    told = f"({margin}): {_meaning(name, task)}"
    told += f"; its floor is {floors}" if floors else ""
    alike.setdefault(told, []).append(name)
  return "\n".join(f"- {', '.join(names)} {told}" for told, names in alike.items())


def _interventions_text(task: Task) -> str:
  """Returns the exact form of every kind of control, its values and its price."""
  hooks = task.interface.names
  # The prompt lists these names already, and they are many.
  known = {hooks: "one of the hooks"}
  known[tuple(dict.fromkeys((*hooks, *task.interface.plan)))] = "hooks and PLAN keys"
  lines = []
  for each in interventions.of_task(task.interface, task.interventions).values():
    told = [json.dumps(each.example) + " " + each.doc]
    if each.tells:
      told.append(f"it tells {each.tells}")
    for name, value in each.values.items():
      form = known.get(value.one_of, value.form)
      form = f"a list of {form}" if value.several and value.one_of in known else form
      optional = " (optional)" if value.optional else ""
      told.append(f"`{name}` is {form}{optional}: {value.doc}")
    lines.append(f"  {'; '.join(told)}; {_cost(task, each.example)}")
  return "\n".join(lines)


def _limits(call_seconds: float) -> str:
  return (
    f"Limits: {limits.MAX_BYTES} bytes of source; per hook {limits.OPERATIONS} "
    f"operations of the compiled program of one unit (a loop's body counts once here, "
    f"and so does what is under jax.vmap, however many it maps over; a "
    "Python loop counts every turn), "
    f"{limits.CONSTANT_BYTES} bytes of constants, "
    f"{limits.VALUE_BYTES >> 20} MiB of intermediate values and {limits.FLOPS:.2g} "
    f"floating-point operations a unit, a loop's body counted once. Time is spent on "
    "every turn of every loop, times the units of a call: "
    f"{limits.TRACE_SECONDS:g} s to trace and {call_seconds:g} processor "
    "seconds (of one core) for a call with its compilation, after which it counts as "
    "failed and is charged."
  )


def _system(task: Task, context: Context) -> str:
  """Returns what is the same in every prompt of a run."""
  interface, evidence = task.interface, context.evidence
  sizes = [", ".join(f"{k} {v}" for k, v in size.items()) for size in interface.sizes]
  plan = [
    f"- {key}: {' | '.join(map(repr, values))} (default {values[0]!r}): "
    f"{interface.plan_docs.get(key, '')}"
    for key, values in interface.plan.items()
  ]
  key, values = next(iter(interface.plan.items()))
  form = ANSWER.format(plan=json.dumps({key: values[-1]}))
  if context.asks and task.proxy() is not None:
    form += ASKING
  if evidence in WITH_QUESTIONS:
    again = [kind for kind, each in task.interventions.items() if each.elsewhere]
    form += QUESTION.format(
      target=task.target,
      interventions=_interventions_text(task),
      rivals="; ".join((ANOTHER_PART.format(target=task.target), *task.rivals_told)),
      except_=", but for other_text" if OTHER_TEXT in task.interventions else "",
      again=AGAIN.format(kinds=" and ".join(again)) if again else "",
      least=QUESTION_CALLS,
    )
    form += BINDING if context.compiles else ""
  if evidence in WITH_QUESTIONS and task.example:
    form += (
      "\nA complete answer to a first prompt, for its form and not for its idea:\n"
      + json.dumps(task.example)
    )
  parts = [
    INTRODUCTION,
    f"The task. {task.description}",
    f"The module begins with, unless it has functions of these names:\n"
    f"{interface.header.strip()}",
    "Hooks, in the order in which they run"
    + (f" (units have these sizes: {'; '.join(sizes)})" if any(sizes) else "")
    + ":\n"
    + _hooks_text(interface.hooks),
    "PLAN:\n" + "\n".join(plan),
    _limits(context.call_seconds),
    "Observables (lower is better), and the margin up to which a change is `same`:\n"
    + _observables_text(task),
    form,
  ]
  return "\n\n".join(parts)


def _cost(task: Task, intervention: Mapping[str, Any]) -> str:
  """Says what a control is charged; one on another text is run on the parent too."""
  calls = task.price(intervention)
  if intervention["kind"] == OTHER_TEXT:
    return f"{2 * calls} calls, the parent's run included, which is paid once"
  return f"{calls} call{'' if calls == 1 else 's'}"


def _grid(parts: Mapping[str, float]) -> str:
  """Renders numbers of parts named `row/.../column` as a table, a row a line.

  A table of more than `ROWS` rows names its columns once, and has units of its own.
  """
  rows: dict[str, dict[str, float]] = {}
  for path, value in parts.items():
    row, _, column = path.partition("/")
    rows.setdefault(row, {})[column.rpartition("/")[2]] = value
  if len(rows) <= ROWS:
    cells = lambda row: ", ".join(f"{name} {value:.3g}" for name, value in row.items())
    return "\n".join(f"  {name}: {cells(row)}" for name, row in rows.items())
  number = lambda row: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", row)]
  columns = [*dict.fromkeys(column for row in rows.values() for column in row)]
  most = max(abs(value) for row in rows.values() for value in row.values())
  # So that the largest number has two digits before its point.
  unit = 10.0 ** (math.floor(math.log10(most)) - 1) if most else 1.0
  cells = lambda row: " ".join(
    f"{row[column] / unit:.3g}" if column in row else "-" for column in columns
  )
  lines = [f"  {name}: {cells(rows[name])}" for name in sorted(rows, key=number)]
  return "\n".join([f"  in units of {unit:g}: {' '.join(columns)}", *lines])


def _budget_text(context: Context) -> str:
  if (left := context.budget) is None:
    return ""
  if left.is_single:
    told = f"{left.calls_left} evaluator call is left, for your program as it is."
    if context.evidence in WITH_QUESTIONS:
      told += (
        " A question is asked all the same, although so few are left, and no control "
        "of it will run."
      )
    return told
  told = f"{left.calls_left} of {left.calls} evaluator calls are left"
  if left.tokens_left is not None:
    told += f", {left.tokens_left} of your tokens"
  if left.dollars_left is not None:
    told += f", {left.dollars_left:.2f} dollars"
  return f"{told}."


WITHOUT_DEFAULTS = (
  "without the functions that equal their default, which belong to it all the same"
)


def _without_defaults(source: str, interface: Interface) -> tuple[str, bool]:
  """Returns a program without functions that the interface has word for word.

  And whether that is the whole program.
  """
  try:
    tree = ast.parse(source)
  except (SyntaxError, RecursionError, MemoryError):
    # What the parser cannot read is told as it is.
    return source, True
  texts = (interface.header, *(hook.default for hook in interface.hooks))
  known = {ast.unparse(node) for text in texts for node in ast.parse(text).body}
  lines, is_whole = source.splitlines(), True
  # From the end, so that the line numbers of what comes before stay right.
  for node in reversed(tree.body):
    if isinstance(node, ast.FunctionDef) and ast.unparse(node) in known:
      del lines[node.lineno - 1 : node.end_lineno]
      is_whole = False
  if is_whole:
    return source, True
  return re.sub(r"\n{3,}", "\n\n\n", "\n".join(lines)).strip() + "\n", False


def _seconds(by_part: Mapping[str, float]) -> str:
  """Says what a call took, as a sentence without its beginning; most first."""
  parts = sorted(by_part.items(), key=lambda part: (-part[1], part[0]))
  told = ", ".join(f"{name} {each:.3g}" for name, each in parts)
  return (
    f"{sum(by_part.values()):.3g} processor seconds: {told}. The rest is what is no "
    "hook, and hooks that run within a layer."
  )


def _question(
  context: Context, references: Mapping[str, float], task: Task
) -> list[str]:
  """Returns code, objective and diagnostics, as far as the arm's evidence allows."""
  parent, target = context.parent, context.target
  values = dict(parent.values)
  if context.evidence in ("none", "score"):
    values = {target: values[target]}
  because = f" It is revised now because {context.why}." if context.why else ""
  took = ""
  if context.seconds is not None:
    took = f" Its call took {_seconds(context.seconds)}"
  parts = [
    f"Target to lower: {target}. {_budget_text(context)}".strip(),
    f"The parent, which you revise and which predictions are relative to, is "
    f"{parent.id[:8]}.{because}{took} Measured on it: {_measured(values)}",
  ]
  if units := {
    hook.name: count
    for hook in task.interface.hooks
    if (count := task.units(parent.plan).get(hook.name)) and hook.is_active(parent.plan)
  }:
    told = ", ".join(f"{name} {count}" for name, count in units.items())
    parts.append(f"Units on which a call of the parent runs each hook: {told}.")
  if references:
    known = ", ".join(f"{value:.6g} for {name}" for name, value in references.items())
    now = f"{target} is {values[target]:.6g} now"
    parts.append(f"For comparison, {now}; it is {known}.")
  if len(values) > 1:
    parts += [
      f"Its {name} part by part:\n{_grid(each)}" for name, each in parent.parts.items()
    ]
  shown, is_whole = _without_defaults(parent.source, task.interface)
  head = "Program" + ("" if is_whole else f", {WITHOUT_DEFAULTS}")
  parts.append(f"{head}:\n{shown}")
  if context.evidence in ("reflect", "controls"):
    parts.append(REFLECTION)
  return parts


def _parts_edited(demand: Demand) -> list[str]:
  """Names the parts that an edit changed itself, not those that a key switched on."""
  value = lambda call, name: (call.computation.get(name), call.plan.get(name))
  own = [
    name
    for name in demand.computation
    if value(demand.before, name) != value(demand.intervention, name)
  ]
  return own or [*demand.computation]


def _demand_text(demand: Demand, context: Context) -> str:
  """Says what a demand asks and where, and whether the next answer is checked on it."""
  residual, where = demand.residual, ", ".join(_parts_edited(demand))
  told = (
    f"{RESPONSES[demand.response]}. {demand.label} was {demand.verdict} on "
    f"{residual.observable} (left standing: {', '.join(demand.survivors) or 'none'}). "
  )
  if demand.forbids:
    return f"Forbidden (checked on every answer): {told}It edited {where}."
  about = " or ".join(demand.about or (residual.observable,))
  how = f"The response must move {about} beyond its margin; the edit was of {where}."
  if demand.response == Response.ADD_DISCRIMINATOR and demand.survivors:
    how = f"Make the same edit of {where}, with the new control."
    if (again := context.repeated) is not None and demand == context.checked:
      how = (
        f"The edit of {where} is made: what you answer is merged into {again.id[:8]}, "
        'and without "code", "plan" and "source" that is the program. It is the one '
        f"above, but for\n{limits.diff(context.parent.source, again.source)}"
      )
  checked = "checked on this answer" if demand == context.checked else "not checked now"
  return f"Required response, {checked}: {told}{how}"


def _owed_later(demand: Demand, context: Context) -> str:
  """Says in a line what is owed beside the demand that is told in full."""
  observable, checked = demand.residual.observable, context.checked
  told = (
    f"Owed later: {demand.response.replace('_', ' ')}, because {demand.label} was "
    f"{demand.verdict} on {observable}."
  )
  if checked is None or checked.residual.observable == observable:
    return told
  return (
    f'{told} With "residual": "{observable}" it is checked in the place of the first.'
  )


def _residual_text(residual: Residual, context: Context) -> str:
  moved = ", ".join(context.scopes.get(residual.observable, ())) or "nothing yet"
  if sets := context.joint_scopes.get(residual.observable):
    moved = "edits of several parts, of which nobody knows which did it: "
    moved += "; ".join(" + ".join(each) for each in sets)
  return (
    f"{residual.observable} = {residual.value:.4g} (open above "
    f"{residual.threshold:.4g}; seen to be moved by {moved})"
  )


def _open_text(owed: Sequence[Demand], context: Context) -> str:
  """Lists what a question may be about: what a demand is about, and what is open."""
  open_ = {residual.observable: residual for residual in context.residuals}
  due = dict.fromkeys(demand.residual.observable for demand in owed)
  lines = []
  for name in dict.fromkeys((*due, *open_)):
    if name in open_:
      lines.append(f"- {_residual_text(open_[name], context)}")
      continue
    value = context.parent.values.get(name)
    told = f"- {name}" if value is None else f"- {name} = {value:.4g}"
    lines.append(f"{told}; a demand is about it")
  if not lines:
    return 'Nothing is open to a question now: leave "residual" null.'
  return "\n".join(['Open to a question now, as "residual":', *lines])


def _lineage_text(context: Context, interface: Interface) -> list[str]:
  """Returns the way to the champion and the other retained programs, a line each."""
  target, best = context.target, context.champion
  head = f"Best program {best.id[:8]}, {target} {best.values[target]:.6g}"
  shown = f"{head}: the program above."
  if best.id != context.parent.id:
    difference = limits.diff(context.parent.source, best.source)
    source, is_whole = _without_defaults(best.source, interface)
    whole = head if is_whole else f"{head}, {WITHOUT_DEFAULTS}"
    # Whole, or as a change of the program above, whichever is shorter.
    shown = min(
      f"{whole}:\n{source}",
      f"{head}: the program above, but for\n{difference}",
      key=len,
    )
  own = {e.program: edited(e.diff) for e in context.history if e.status == "ok"}
  changed = lambda step: ", ".join(own.get(step.program) or step.changed)
  steps = [
    f"  {step.program[:8]} {target} {step.value:.6g}: {step.label}"
    + (f" (changed {changed(step)})" if step.changed else "")
    for step in context.lineage
  ]
  way = "How it came about, from the start:\n" + "\n".join(steps)
  others = [r for r in context.donors if r.id != best.id]
  kept = [f"{r.id[:8]} {target} {r.values[target]:.6g}" for r in others]
  told = [shown, *([way] if len(steps) > 1 else [])]
  return told + ([f"Also retained: {', '.join(kept)}"] if kept else [])


def memory(
  context: Context,
  interface: Interface,
  allowance: int = MEMORY_TOKENS,
  count: Count = estimated_tokens,
  whole: int | None = None,
) -> str:
  """Returns the memory section, within `allowance` tokens.

  `whole` is that of `Changes`.

  Demands and residuals come first, then the champion with its lineage in short form;
  experiments take the rest. What does not fit is counted.
  """
  if context.evidence == "none":
    return "Experiments so far:\nnone"
  # Room for the two lines that may say what was left out.
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

  if context.evidence in WITH_QUESTIONS:
    demands = context.demands if context.evidence == "verdict" else ()
    owed = [demand for demand in demands if not demand.forbids]
    # The one that this answer is checked on goes first: of what is owed, the first is
    # told in full.
    owed.sort(key=lambda demand: demand != context.checked)
    in_full = (*owed[:1], *(demand for demand in demands if demand.forbids))
    texts = [_demand_text(demand, context) for demand in in_full]
    texts += [_owed_later(demand, context) for demand in owed[1:]]
    if context.focus is not None and context.checked is None:
      texts.append(f"This round is about {_residual_text(context.focus, context)}.")
    texts.append(_open_text(owed, context))
    add(texts, "demands and residuals", left)
  stagnation = f"Experiments since the best program improved: {context.stagnation}"
  add([stagnation, *_lineage_text(context, interface)], "programs", left)
  table, head = "What was measured:\n", "Experiments so far:"
  entries = select(context, max(left - count(f"{table}\n\n{head}\n"), 0), count, whole)
  if rows := measurements(entries):
    shown.append(table + rows)
  told = _entries_text(entries, context, whole)
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
  system = _system(task, context)
  shown = task.references if context.evidence not in ("none", "score") else {}
  parts = "\n\n".join(_question(context, shown, task))
  fixed = count(system) + count(parts + "\n\n") + reserve
  least = count(f"{_LEFT_OUT.format(10**6, 'programs')}\n") * 3
  if fixed + least > INPUT_TOKENS:
    raise ValueRefusal(
      "prompt",
      expected=f"a program and instructions within {INPUT_TOKENS} tokens",
      got=fixed,
      mend="shorten the program",
    )
  allowance = min(MEMORY_TOKENS, INPUT_TOKENS - fixed)
  user = ""
  for whole in range(WHOLE, -1, -1):
    told = memory(context, task.interface, allowance, count, whole)
    user = f"{parts}\n\n{told}"
    if len(f"{system}{user}".encode()) <= WHOLE_UP_TO:
      # Long prompts are read less well than what they hold is worth.
      break
  return [{"role": "system", "content": system}, {"role": "user", "content": user}]
