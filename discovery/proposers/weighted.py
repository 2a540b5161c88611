"""Language models from the options of a run: one endpoint, or several with weights."""

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic

from mxjax.discovery.core import identity
from mxjax.discovery.core.proposal import Context, Proposal, Proposer
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Task
from mxjax.discovery.proposers import prompt
from mxjax.discovery.proposers.endpoint import (
  PROBE_SECONDS,
  Cassette,
  HttpClient,
  Reply,
)
from mxjax.discovery.proposers.llm import LlmProposer
from mxjax.errors import ValueRefusal

CLIENT = ("base_url", "model", "key_variable", "deadline")
Price = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class _Endpoint(pydantic.BaseModel, extra="forbid", strict=True):
  url: str
  model: str
  weight: float = pydantic.Field(1.0, gt=0, allow_inf_nan=False)
  prices: tuple[Price, Price] | None = None
  deadline: float = pydantic.Field(600.0, gt=0, allow_inf_nan=False)
  key_variable: str = pydantic.Field("OPENAI_API_KEY", alias="key-variable")


def endpoints(text: str) -> list[dict[str, Any]]:
  """Reads a JSON list of endpoints into the settings of their clients.

  Each has `url` and `model`, and may have `weight`, `prices` in dollars a million
  tokens in and out, `deadline` in seconds for a request with all its retries, and
  `key-variable`, the environment variable of its key.

  Raises:
    ValueError: It is no such list.
  """
  try:
    read = pydantic.TypeAdapter(list[_Endpoint]).validate_json(text)
  except pydantic.ValidationError as error:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    raise ValueRefusal(
      "discover: --endpoints" + (f": {where}" if where else ""),
      expected="a list of endpoints with `url` and `model`",
      got=f"{first['input']!r:.200} ({first['msg']})",
      mend="mend the list",
    ) from None
  if not read:
    raise ValueRefusal(
      "discover: --endpoints",
      expected="one endpoint or more",
      got="none",
      mend="name one",
    )
  return [
    {"base_url": one.url, **one.model_dump(exclude={"url"}, exclude_none=True)}
    for one in read
  ]


def clients(settings: Mapping[str, Any], *, metered: bool = False) -> list[HttpClient]:
  """Returns the clients of a run's endpoints; for `metered` see `HttpClient`."""
  return [
    HttpClient(**{k: v for k, v in one.items() if k in CLIENT}, metered=metered)
    for one in settings.get("endpoints") or [settings]
  ]


def greet(settings: Mapping[str, Any], *, metered: bool = False) -> list[str]:
  """Asks every endpoint of a run for one word; returns what each said, a sentence each.

  `probe_seconds` of the settings is the time that each has. One that says nothing in it
  is cold, which is no failure: the first proposal waits for it.

  Raises:
    OutageError: One is not there, or refuses.
  """
  seconds = settings.get("probe_seconds") or PROBE_SECONDS
  told = []
  for client in clients(settings, metered=metered):
    if (reply := client.probe(seconds)) is not None:
      told.append(f"endpoint: {reply.model!r} answered")
    else:
      told.append(
        f"endpoint: {client.model!r} gave no answer within {seconds:g} s; it may still "
        f"be loading, and the first proposal waits up to {client.deadline:g} s for it"
      )
  return told


def make(
  settings: Mapping[str, Any],
  task: Task,
  *,
  store: Store | None = None,
  metered: bool = False,
) -> Proposer:
  """Builds the proposer of `RunOptions.proposer` of kind `llm` or `cassette`.

  `store` keeps replies, so that a resumed run pays for none twice.
  """
  several = settings.get("endpoints")
  each: Sequence[Mapping[str, Any]] = several or [settings]
  path, tokenizer = settings.get("cassette"), settings.get("tokenizer")
  is_replay = settings["kind"] == "cassette"
  asked: Sequence[HttpClient | None] = [None] * len(each)
  if not is_replay:
    asked = clients(settings, metered=metered)
  made = []
  for one, live in zip(each, asked, strict=True):
    client: Any = live
    if path:
      scope = f"{one['base_url']} {one['model']}" if several else ""
      mode = "replay" if is_replay else "record"
      client = Cassette(path, mode, live, scope=scope)
    made.append(
      LlmProposer(
        client,
        task,
        count=prompt.tokenizer_count(tokenizer)
        if tokenizer
        else prompt.estimated_tokens,
        price=functools.partial(_price, one.get("prices") or (0.0, 0.0)),
        effort=settings.get("effort"),
        endpoint=one["base_url"] if several else "",
        store=store,
      )
    )
  return (
    WeightedProposer(made, [one["weight"] for one in several]) if several else made[0]
  )


def _price(prices: Sequence[float], reply: Reply) -> int:
  """Returns micro-dollars, of which a token costs the dollars of a million tokens."""
  return round(prices[0] * reply.input_tokens + prices[1] * reply.output_tokens)


class WeightedProposer:
  """Asks one of several models for each proposal.

  Which one is drawn from the run's seed and the proposal's address alone, so a resumed
  run asks the same one; while it does not answer, no other is asked in its place.
  """

  def __init__(self, proposers: Sequence[Proposer], weights: Sequence[float]) -> None:
    """Takes proposers and their weights, which need not add up to 1."""
    self._proposers, self._bounds = proposers, list(itertools.accumulate(weights))
    named = zip(proposers, weights, strict=True)
    self.name = "+".join(f"{one.name}*{weight:g}" for one, weight in named)

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`."""
    drawn = identity.draw(context.seed, list(context.address), "endpoint")
    chosen = bisect.bisect_right(self._bounds, drawn * self._bounds[-1])
    return self._proposers[chosen].propose(context)
