"""What a plan of a trial holds, and why one is refused before anything is measured."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from mxjax.discovery.sandbox.jail import LEVELS
from mxjax.discovery.search.settings import SearchConfig
from mxjax.discovery.studies.arms import ARMS
from mxjax.discovery.studies.trial_replay import CONDITIONS
from mxjax.errors import ValueRefusal

RUNS_OF = "runs_of"
"""Of a plan, in the place of tasks and runs: the archive of an earlier trial."""
FROZEN = frozenset(("arms", "sources", "versions", "hash"))
"""What freezing adds to a plan."""


class _Table(pydantic.BaseModel, extra="forbid", strict=True):
  pass


class Endpoint(_Table):
  """Who answers.

  Attributes:
    base_url: An OpenAI-compatible address; `{name}` is that of the run.
    run_model: The model of a run; `{name}` is that of the run and `{arm}` its arm.
    replay_model: The model of a replay; `{letter}` stands for a condition without
      telling it, `{condition}` tells it.
    deadline: Seconds that a request waits for its answer, with all retries.
    key_variable: The environment variable with the key.
    probe_seconds: Seconds that a first word may take.
    effort: The reasoning effort to ask for.
    prices: Dollars for a million tokens in and out.
    tokenizer: A file by which tokens are counted.
  """

  base_url: str
  run_model: str
  replay_model: str
  deadline: PositiveFloat | None = None
  key_variable: str | None = None
  probe_seconds: PositiveFloat | None = None
  effort: str | None = None
  prices: list[float] | None = None
  tokenizer: str | None = None


class Replay(_Table):
  """Which verdicts are replayed, and how.

  Attributes:
    runs: Names of runs.
    samples: Answers to each prompt.
    per_run: Verdicts of a run at most, the first ones.
    conditions: Those that are asked; all if left out.
    returns: Times that an answer in which the probe finds no response goes back.
  """

  runs: list[str]
  samples: PositiveInt
  per_run: PositiveInt
  conditions: Annotated[list[Literal[CONDITIONS]], Field(min_length=1)] | None = None  # pyright: ignore[reportInvalidTypeForm]
  returns: NonNegativeInt = 0


class Run(_Table):
  """One run.

  Attributes:
    task: The name of a task of the plan.
    arm: One of `ARMS`.
    seed: Of the search.
    budget: Evaluator calls.
    config: Settings of `SearchConfig` in the place of the arm's.
    max_tokens: Tokens of the proposer after which nothing more is asked.
  """

  task: str
  arm: str
  seed: int
  budget: PositiveInt
  config: dict[str, Any] = {}
  max_tokens: PositiveInt | None = None


class Plan(_Table):
  """A whole plan, without what freezing adds.

  Attributes:
    question: What the trial asks, in words.
    expects: What is expected, in words.
    stop: When runs end, and what is never done, in words.
    validity: Share of all controls that must end well, or the trial is void.
    sandbox: The level at which programs run.
    endpoint: Who answers.
    replay: Which verdicts are replayed.
    tasks: Specifications of tasks by name; `heldout` of one has what differs held out.
    runs: Runs by name.
    runs_of: The earlier trial that tasks and runs are taken from.
  """

  question: str
  expects: str
  stop: str
  validity: Annotated[float, Field(ge=0, lt=1)]
  sandbox: Literal[LEVELS]  # pyright: ignore[reportInvalidTypeForm]
  endpoint: Endpoint
  replay: Replay
  tasks: dict[str, dict[str, Any]]
  runs: dict[str, Run]
  runs_of: str | dict[str, str] | None = None


def check(plan: Mapping[str, Any], file: pathlib.Path) -> None:
  """Refuses a plan, without what freezing adds, that no trial can be opened with.

  Raises:
    ValueError: It lacks something, or has what no plan has; the first fault is named.
  """
  try:
    read = Plan.model_validate({**plan})
  except pydantic.ValidationError as error:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    is_absent = first["type"] == "missing"
    is_stray = first["type"] == "extra_forbidden"
    expected = "this key, which every plan has" if is_absent else first["msg"]
    got = "none" if is_absent else f"{first['input']!r:.80}"
    raise ValueRefusal(
      f"{file}: {place}",
      expected="no such key" if is_stray else expected,
      got=got,
      mend="docs/guides/trial.md has every key of a plan",
    ) from None
  for name, run in read.runs.items():
    # Names of runs are names of files.
    if not re.fullmatch(r"\w[\w.-]*", name):
      raise ValueRefusal(
        f"{file}: runs",
        expected="names of letters, digits, points, hyphens and underscores",
        got=repr(name),
        mend="give the run another name",
      )
    if run.arm not in ARMS or run.task not in read.tasks:
      raise ValueRefusal(
        f"{file}: runs.{name}",
        expected=f"an arm of {', '.join(ARMS)} and a task of {', '.join(read.tasks)}",
        got=f"{run.arm!r} and {run.task!r}",
        mend="name some of these",
      )
    _check_config(run.config, f"{file}: runs.{name}.config")
  for name, spec in read.tasks.items():
    if not isinstance(spec.get("task"), str):
      raise ValueRefusal(
        f"{file}: tasks.{name}",
        expected="`task`, the name of a task such as 'world' or 'ptq'",
        got=f"{spec.get('task')!r:.80}",
        mend="name one",
      )
  if unknown := sorted({*read.replay.runs} - {*read.runs}):
    raise ValueRefusal(
      f"{file}: replay.runs",
      expected=f"some of {', '.join(read.runs)}",
      got=unknown,
      mend="name runs of the plan",
    )
  _check_names(read.endpoint, file)


def _check_config(config: Mapping[str, Any], place: str) -> None:
  known = [field.name for field in dataclasses.fields(SearchConfig)]
  if unknown := sorted({*config} - {*known}):
    raise ValueRefusal(
      place,
      expected=f"some of {', '.join(known)}",
      got=unknown,
      mend="name settings of a search",
    )


def _check_names(endpoint: Endpoint, file: pathlib.Path) -> None:
  """Refuses names of models and addresses with a field that nothing is put into."""
  fields = {
    "base_url": ("name",),
    "run_model": ("name", "arm"),
    "replay_model": ("name", "condition", "letter"),
  }
  for key, names in fields.items():
    text = getattr(endpoint, key)
    try:
      text.format(**dict.fromkeys(names, ""))
    except (KeyError, IndexError, ValueError) as error:
      raise ValueRefusal(
        f"{file}: endpoint.{key}",
        expected=f"fields among {', '.join(f'{{{name}}}' for name in names)}",
        got=f"{text!r:.80} ({error})",
        mend="use these alone",
      ) from None
