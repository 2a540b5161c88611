"""What options of `mxjax discover` name: a run, a study, and what they will cost."""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core import task as tasks
from mxjax.discovery.sandbox.jail import LEVELS
from mxjax.discovery.search import runs
from mxjax.discovery.search.settings import SearchConfig
from mxjax.discovery.studies.arms import ARMS, AS_IN_PAPER
from mxjax.discovery.studies.study import StudyOptions
from mxjax.discovery.tasks.ptq import programs
from mxjax.errors import ValueRefusal

LLM = ("llm", "cassette")
PROPOSERS: Mapping[str, tuple[str, ...]] = {
  **dict.fromkeys(("endpoint", "endpoint_model", "prices", "deadline"), LLM),
  **dict.fromkeys(("key_variable", "probe_seconds"), LLM),
  **dict.fromkeys(("reasoning_effort", "cassette", "tokenizer"), LLM),
  **dict.fromkeys(("max_tokens", "max_cost"), LLM),
  "answers": ("human",),
  "contested_accounts": ("embedded",),
}
"""Options that some proposers alone have, and which those are."""
OF_ALL_ARMS = ("start", "proposals_per_call", "revise_retired")
"""Fields of `SearchConfig` that the command line sets for all arms of a study."""

OWN_OF_STUDY: Mapping[str, Any] = {
  "arm": "quantforge",
  "width": 1,
  "seed": 0,
  "as_in_paper": False,
  "holdout": "after",
}
"""Options of a run that a study sets itself, as they are if nobody gave them."""


def run_options(options: argparse.Namespace) -> runs.RunOptions:
  """Builds the options of a run folder.

  Raises:
    ValueError: What was chosen is not complete.
  """
  # The task, with what `--task-options` says and options of its own.
  spec = {**task_spec(options.task), **_task_options(options.task_options)}
  if options.task in tasks.WORLDS:
    # A world of its own for each seed, unless the task's options name one.
    spec.setdefault("seed", options.seed)
  named = {
    "model": options.model,
    "holdout": options.holdout_model,
    "transfer": options.transfer_model,
    "dtype": options.dtype,
  }
  given = {name: value for name, value in named.items() if value}
  if given and options.task in tasks.WORLDS:
    raise ValueRefusal(
      "discover",
      expected=f"no model or dtype for --task {options.task}",
      got=", ".join(map(str, given.values())),
      mend="leave it out, or use --task ptq",
    )
  spec |= given
  # The search: what the arm changes wins over these options.
  config = {
    "seed": options.seed,
    "budget": options.budget,
    "width": options.width,
    "revise_retired": options.revise_retired,
    **ARMS[options.arm].changes,
  }
  if options.as_in_paper:
    config |= AS_IN_PAPER
  if options.paper_allocation:
    config["allocation"] = ARMS[options.arm].allocation
  if options.proposals_per_call != SearchConfig.proposals_per_call:
    config["proposals_per_call"] = options.proposals_per_call
  if options.start:
    config["start"] = _program(options.start)
  for name in ("max_tokens", "max_cost"):
    if getattr(options, name) is not None:
      config[name] = getattr(options, name)
  return runs.RunOptions(
    task=spec,
    config=config,
    sandbox=options.sandbox,
    proposer=_proposer(options),
    holdout=options.holdout,
  )


def _task_options(text: str) -> dict[str, Any]:
  """Returns the JSON object of `--task-options`.

  Raises:
    ValueError: The text is no JSON object.
  """
  try:
    values = json.loads(text)
  except ValueError as error:
    values = error
  if not isinstance(values, dict):
    got = f"{text[:80]!r}" + (f": {values}" if isinstance(values, ValueError) else "")
    raise ValueRefusal(
      "discover",
      expected="a JSON object in --task-options",
      got=got,
      mend="""write one in single quotes, such as '{"objective": "kl"}'""",
    )
  return values


def _proposer(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the settings of the proposer.

  Raises:
    ValueError: What the proposer needs is absent, or what it would ignore is given.
  """
  for name, kinds in PROPOSERS.items():
    value = getattr(options, name)
    if value and options.proposer not in kinds:
      option = f"--{name.replace('_', '-')}"
      words = value if isinstance(value, list) else [] if value is True else [value]
      raise ValueRefusal(
        "discover",
        expected=f"--proposer {' or '.join(kinds)} beside "
        f"{' '.join(map(str, (option, *words)))}",
        got=f"{options.proposer}, which does not read it",
        mend=f"add --proposer {kinds[0]}, or leave {option} out",
      )
  proposer: dict[str, Any] = {"kind": options.proposer}
  if options.contested_accounts:
    proposer["contested"] = True
  if options.proposer == "human":
    proposer["folder"] = options.answers or "answers"
  if options.proposer not in LLM:
    return proposer
  if options.proposer == "cassette" and not options.cassette:
    raise ValueRefusal(
      "discover",
      expected="--cassette with the file to replay for --proposer cassette",
      got="none",
    )
  given = {
    "base_url": options.endpoint,
    "model": options.endpoint_model,
    "prices": options.prices,
    "deadline": options.deadline,
    "key_variable": options.key_variable,
    "probe_seconds": options.probe_seconds,
  }
  given = {name: value for name, value in given.items() if value is not None}
  if options.proposer == "llm" and not {"base_url", "model"} <= given.keys():
    raise ValueRefusal(
      "discover",
      expected="--endpoint and --endpoint-model for --proposer llm",
      got="one of the two" if {"base_url", "model"} & {*given} else "neither",
      mend="give both",
    )
  proposer |= given
  if options.max_cost is not None and not options.prices:
    raise ValueRefusal(
      "discover",
      expected="the endpoint's --prices beside --max-cost",
      got="none",
      mend="give them, or leave --max-cost out",
    )
  return proposer | {
    "cassette": options.cassette,
    "tokenizer": options.tokenizer,
    "effort": options.reasoning_effort,
  }


def _program(name: str) -> str:
  """Returns the source of a file, or of a program of the ptq task.

  Raises:
    ValueError: There is neither.
  """
  path = pathlib.Path(name)
  if path.is_file():
    return path.read_text()
  if name not in programs.NAMES:
    raise ValueRefusal(
      "discover: --start",
      expected=f"a file, {', '.join(programs.NAMES)}",
      got=repr(name),
    )
  return programs.source(name)


def task_spec(name: str) -> dict[str, Any]:
  """Returns the beginning of a task's specification, with the folder of its module."""
  if pathlib.Path(name).is_dir():
    return {"task": str(pathlib.Path(name).resolve())}
  module, _, function = name.partition(":")
  here = pathlib.Path.cwd()
  package = module.partition(".")[0]
  is_here = any((here / file).exists() for file in (f"{package}.py", package))
  # The command's own sys.path does not have the current folder.
  if function and is_here:
    return {"task": name, "path": str(here)}
  return {"task": name}


def study_options(
  parsed: argparse.Namespace, spec: Mapping[str, Any], run: runs.RunOptions
) -> StudyOptions:
  """Builds the options of a study folder, from those of a run on the task `spec`.

  Raises:
    ValueError: The sandbox is off for a proposer other than `embedded`; or an option is
      set that a study does not have.
  """
  if given := [
    f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
    for name, default in OWN_OF_STUDY.items()
    if (value := getattr(parsed, name)) != default
  ]:
    raise ValueRefusal(
      "study",
      expected="what is a study's own (arms, of one proposal from each state, seeds, "
      "accounting, held-out marks) not as options of a run",
      got=" and ".join(given),
      mend="leave it out",
    )
  proposer = run.proposer
  if proposer["kind"] != "embedded" and parsed.sandbox == "off":
    raise ValueRefusal(
      "study",
      expected=f"a sandbox for programs of {proposer['kind']}",
      got="--sandbox off",
      mend=f"use --sandbox {LEVELS[0]}",
    )
  return StudyOptions(
    task=spec,
    seeds=tuple(parsed.seeds),
    tuning_seeds=tuple(parsed.tuned_on),
    budget=parsed.budget,
    gate=parsed.gate,
    gate_at=parsed.gate_at,
    is_allocated=parsed.paper_allocation,
    is_sequential=parsed.our_accounting,
    config={
      name: value
      for name, value in run.config.items()
      if name in OF_ALL_ARMS and value != getattr(SearchConfig, name)
    },
    expects=parsed.expects,
    sandbox=parsed.sandbox,
    proposer=proposer,
  )


def measured(task: tasks.Task, sandbox: str, calls: int) -> str:
  """Runs the default program twice and says what a number of calls would take."""
  first, later = runs.measure_calls(task, sandbox)
  low, high = (calls * seconds / 3600 for seconds in sorted((first, later)))
  return (
    f"A call of the default program took {first:.1f} s with start and compilation, and "
    f"{later:.1f} s again (sandbox {sandbox}); {calls} calls on one worker take "
    f"{low:.2f} to {high:.2f} h, depending on how many programs are new."
  )
