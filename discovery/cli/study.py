"""`mxjax discover study`: plans, runs and resumes the paper's discovery studies."""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from mxjax.discovery.core import task as task_
from mxjax.discovery.sandbox.jail import LEVELS
from mxjax.discovery.studies import study, tables
from mxjax.evaluation.cli.console import STDOUT


def add(verbs: Any, add_task: Callable[[argparse.ArgumentParser], None]) -> None:
  """Adds the verb.

  Args:
    verbs: Sub-parsers of `mxjax discover`.
    add_task: Adds the options that name a task and a proposer.
  """
  told = "the paper's discovery studies: plan, run or resume, and tabulate"
  verb = verbs.add_parser("study", help=told, description=told)
  verb.add_argument("name", choices=sorted(study.STUDIES))
  verb.add_argument("--out", required=True, metavar="DIR", help="new or begun folder; "
      "studies in one folder share runs")  # fmt: skip
  verb.add_argument("--plan", action="store_true", help="tell the cost, start nothing")
  verb.add_argument("--seeds", type=int, nargs="+", default=list(range(101, 109)),
      metavar="N", help="paired seeds")  # fmt: skip
  verb.add_argument("--tuned-on", type=int, nargs="*", default=[1, 2, 3], metavar="N",
      help="seeds used while cards, margins and gate were set")  # fmt: skip
  verb.add_argument("--gate", type=float, default=0.7, help="share of the way from the "
      "initial program to the ideal, held out")  # fmt: skip
  add_task(verb)
  # Its arms, seeds and accounting are the study's own.
  verb.set_defaults(sandbox="off")


def options(
  parsed: argparse.Namespace, spec: Mapping[str, Any], proposer: Mapping[str, Any]
) -> study.StudyOptions:
  """The options of a folder.

  Raises:
    ValueError: A proposer that is not ours in a study without walls.
  """
  if proposer["kind"] != "embedded" and parsed.sandbox == "off":
    raise ValueError(
      f"study: programs of {proposer['kind']} run behind walls; use --sandbox "
      f"{LEVELS[0]}."
    )
  return study.StudyOptions(
    task=spec,
    seeds=tuple(parsed.seeds),
    tuning_seeds=tuple(parsed.tuned_on),
    budget=parsed.budget,
    gate=parsed.gate,
    sandbox=parsed.sandbox,
    proposer=proposer,
  )


def begun_task(folder: pathlib.Path) -> dict[str, Any] | None:
  """The task that a begun folder was frozen with, or None: it is measured only once."""
  kept = folder / "frozen.json"
  if not kept.exists():
    return None
  return json.loads(kept.read_text())["options"]["task"]


def plan(name: str, made: study.StudyOptions) -> None:
  """Tells calls and hours; starts nothing."""
  chosen = study.STUDIES[name]
  task = task_.load(made.spec(made.seeds[0]))
  count = len(chosen.arms) * len(made.seeds)
  calls = count * made.budget
  hours = calls * task.call_seconds / 3600
  STDOUT.print(f"{chosen.title}: {', '.join(chosen.arms)}", markup=False)
  STDOUT.print(f"seeds: {list(made.seeds)}; tuned on {list(made.tuning_seeds)}")
  STDOUT.print(f"{count} runs, {calls} evaluator calls, held-out marks beside them")
  STDOUT.print(
    f"at most {hours:.1f} h at {task.call_seconds:g} s a call; a computation that "
    "another run paid for is charged and not repeated"
  )


def conduct(name: str, folder: pathlib.Path, made: study.StudyOptions) -> None:
  """Runs or resumes a study and prints its tables."""
  held = study.Folder(folder, made)
  STDOUT.print(f"frozen: {held.frozen['hash']}")
  tell = lambda line: STDOUT.print(line, markup=False, highlight=False)
  try:
    results = study.conduct(held, name, tell)
  finally:
    held.close()
  text = "\n\n".join(table.markdown() for table in tables.tables(results))
  (folder / f"{name}.md").write_text(text + "\n")
  print(text)
