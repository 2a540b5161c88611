"""A language model as the proposer: sends the prompt, reads and repairs the answer."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import (
  MAX_BYTES,
  RejectedError,
  admit,
  changed_definitions,
  merged,
  users,
)
from mxjax.discovery.core.interface import Interface
from mxjax.discovery.core.proposal import Context, OutageError, Proposal
from mxjax.discovery.core.residual import Symbol
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Task
from mxjax.discovery.proposers import prompt, reading
from mxjax.discovery.proposers.endpoint import (
  PROBE_SECONDS,
  Cassette,
  Client,
  HttpClient,
  Reply,
)
from mxjax.errors import ValueRefusal

UNUSABLE_IN_A_ROW = 5
"""Proposals without a usable answer after which the model counts as out of order."""
REPAIRS = 2
"""Times that a refused answer is sent back with the reason."""
ASKS = 2
"""Times that the free proxy answers about a program before it is proposed."""

# Bounds of what a reply may hold, because all of it is hashed, logged and told again.
Name = Annotated[str, pydantic.Field(min_length=1, max_length=120)]
Words = Annotated[str, pydantic.Field(max_length=2000)]
Symbols = dict[Name, Symbol]


class _Explanation(pydantic.BaseModel, extra="forbid", strict=True):
  name: Name
  statement: Words = ""
  predictions: Annotated[dict[Name, Symbols], pydantic.Field(max_length=64)]


class _Control(pydantic.BaseModel, extra="forbid", strict=True):
  name: Name
  intervention: Annotated[dict[str, Any], pydantic.Field(max_length=8)]
  # Models like to say what a control costs; the evaluator decides it.
  cost: Any = pydantic.Field(None, exclude=True)
  statement: Words = ""


class Answer(pydantic.BaseModel, extra="forbid", strict=True):
  """The structured output requested from a model, and what a person writes.

  Attributes:
    source: The whole module; or else
    code: Functions that are merged into the parent's program, by name, and
    plan: Values of PLAN that change.
    ask: A part of which the free proxy is asked before the program is proposed.
    finished: Whether no program is proposed, because no edit would lower the target by
      more than its margin; `note` says why.
  """

  label: Annotated[str, pydantic.Field(max_length=200)] = ""
  note: Annotated[str, pydantic.Field(max_length=4000)] = ""
  source: Annotated[str, pydantic.Field(max_length=MAX_BYTES)] = ""
  code: Annotated[str, pydantic.Field(max_length=MAX_BYTES)] = ""
  plan: Annotated[dict[Name, str | int | bool], pydantic.Field(max_length=64)] = {}
  residual: Name | None = None
  explanations: Annotated[list[_Explanation], pydantic.Field(max_length=16)] = []
  controls: Annotated[list[_Control], pydantic.Field(max_length=64)] = []
  declared: Annotated[list[Name], pydantic.Field(max_length=64)] = []
  ask: Annotated[str, pydantic.Field(max_length=200)] = ""
  finished: bool = False

  @pydantic.model_validator(mode="before")
  @classmethod
  def _without_nulls(cls, values: Any) -> Any:
    """Takes a null in any place for what was left out."""
    return _bare(values) if isinstance(values, dict) else values

  def merged(self, parent: str, interface: Interface) -> str:
    """Returns the whole program: the module, or the parent with what changes.

    Raises:
      ValueError: There is no change, or both forms of one.
    """
    if self.source and (self.code or self.plan):
      raise ValueRefusal(
        "answer",
        expected="either `source` (the whole module) or `code` and `plan` (what "
        "changes)",
        got="both",
        mend="leave one out",
      )
    if self.source:
      return self.source
    if not (self.code or self.plan):
      raise ValueRefusal(
        "answer",
        expected="`code` (functions that you change), `plan` (values that you "
        "change) or `source` (the whole module)",
        got="none",
        mend="write one",
      )
    plan = {k: v for k, v in self.plan.items() if k in interface.plan}
    if unknown := sorted({*self.plan} - {*plan}):
      raise ValueRefusal(
        "plan",
        expected=f"keys among {', '.join(interface.plan)}",
        got=", ".join(unknown),
        mend="use one of these",
      )
    return merged(parent, self.code, plan)

  def proposal(
    self,
    base: str,
    interface: Interface,
    usage: Mapping[str, int],
    *,
    parent: str | None = None,
  ) -> Proposal:
    """Returns the proposal that the answer describes.

    Its functions are merged into `base`. That is its parent, or else a program that has
    made the edit from `parent` already, in which case the answer may leave them out.

    Raises:
      ValueError: It is none, or its program is not admitted; or it is finished and has
        a program all the same, or no reason.
    """
    if self.finished:
      edit = next((k for k in ("source", "code", "plan") if getattr(self, k)), "")
      if edit or not self.note:
        raise ValueRefusal(
          "answer",
          expected="`finished` with a `note` that says why, and without `code`, `plan` "
          "and `source`",
          got=f"`{edit}` beside it" if edit else "no note",
          mend="leave `finished` out to propose a program, or say why there is none",
        )
      words = {"label": self.label or "finished", "note": self.note}
      return Proposal(source="", **words, usage=usage, finished=True)
    is_again = parent is not None and parent != base
    is_bare = not (self.source or self.code or self.plan)
    source = base if is_again and is_bare else self.merged(base, interface)
    values = self.model_dump(
      include={"note", "residual", "explanations", "controls", "declared"}
    )
    values |= {"source": source, "label": self.label or "an edit", "usage": usage}
    declared = self._declared(source, parent or base, interface)
    return Proposal.from_dict({**values, "declared": declared})

  def _declared(self, source: str, parent: str, interface: Interface) -> list[str]:
    """Returns the hooks and PLAN keys that the answer declares, or that differ.

    A helper stands for the hooks that call it, because what executes is hooks.
    """
    mine, before = admit(source, interface), admit(parent, interface)
    known = dict.fromkeys((*interface.names, *interface.plan))
    if self.declared:
      hooks = [
        name if name in known else users(source, (name,), interface) or name
        for name in self.declared
      ]
      flat = [[each] if isinstance(each, str) else each for each in hooks]
      return [*dict.fromkeys(name for names in flat for name in names)]
    edited = {*changed_definitions(parent, source)} - {*interface.names}
    by_helper = users(source, edited, interface) if edited else ()
    return [
      name
      for name in known
      if mine.hooks.get(name) != before.hooks.get(name)
      or mine.plan.get(name) != before.plan.get(name)
      or name in by_helper
    ]


def _bare(values: Any) -> Any:
  if isinstance(values, dict):
    return {k: _bare(v) for k, v in values.items() if v is not None}
  return [_bare(v) for v in values] if isinstance(values, list) else values


KEYS = frozenset(("source", "code", "plan", "label", "ask", "finished"))
"""One of these is in every answer; other objects of a reply are passed over."""


def read(text: str) -> Answer:
  """Returns the answer in a reply.

  Raises:
    ValueError: There is none; one sentence says what is wrong with it.
  """
  try:
    return Answer.model_validate(reading.answer(text, KEYS))
  except pydantic.ValidationError as error:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "answer"
    raise ValueError(
      f"{place}: {first['msg']}, got {json.dumps(first['input'], default=str)[:200]}; "
      f"mend it. The fields are {', '.join(Answer.model_fields)}."
    ) from None


CLIENT = ("base_url", "model", "key_variable", "deadline")
"""Settings of a run that its client takes as they are."""


def client(settings: Mapping[str, Any], *, metered: bool = False) -> HttpClient:
  """Returns the client of a run's endpoint; for `metered` see `HttpClient`."""
  given = {k: v for k, v in settings.items() if k in CLIENT and v is not None}
  return HttpClient(**given, metered=metered)


def greet(settings: Mapping[str, Any], *, metered: bool = False) -> str:
  """Asks the endpoint of a run for one word; returns what it said, a sentence.

  `probe_seconds` of the settings is the time that it has. One that says nothing in it
  is cold, which is no failure: the first proposal waits for it.

  Raises:
    OutageError: It is not there, or refuses.
  """
  seconds = settings.get("probe_seconds") or PROBE_SECONDS
  asked = client(settings, metered=metered)
  if (reply := asked.probe(seconds)) is not None:
    return f"endpoint: {reply.model!r} answered"
  return (
    f"endpoint: {asked.model!r} gave no answer within {seconds:g} s; it may still be "
    f"loading, and the first proposal waits up to {asked.deadline:g} s for it"
  )


def make(
  settings: Mapping[str, Any],
  task: Task,
  *,
  store: Store | None = None,
  metered: bool = False,
) -> "LlmProposer":
  """Builds the proposer of `RunOptions.proposer` of kind `llm` or `cassette`.

  `store` keeps replies, so that a resumed run pays for none twice.
  """
  path, tokenizer = settings.get("cassette"), settings.get("tokenizer")
  is_replay = settings["kind"] == "cassette"
  asked: Any = None if is_replay else client(settings, metered=metered)
  if path:
    asked = Cassette(path, "replay" if is_replay else "record", asked)
  count = prompt.tokenizer_count(tokenizer) if tokenizer else prompt.estimated_tokens
  for_input, for_output = settings.get("prices") or (0.0, 0.0)
  return LlmProposer(
    asked,
    task,
    count=count,
    # Micro-dollars, of which a token costs the dollars of a million tokens.
    price=lambda reply: round(
      for_input * reply.input_tokens + for_output * reply.output_tokens
    ),
    effort=settings.get("effort"),
    store=store,
  )


class LlmProposer:
  """Proposals by a language model, with two repair turns."""

  def __init__(
    self,
    client: Client,
    task: Task,
    *,
    count: prompt.Count = prompt.estimated_tokens,
    price: Callable[[Reply], int] = lambda reply: 0,
    effort: str | None = None,
    store: Store | None = None,
  ) -> None:
    """Sets up the proposer.

    `client` is an endpoint or a cassette, `count` counts tokens, and `price` returns
    the cost of a reply in micro-dollars. `effort` is the reasoning effort to ask for,
    such as `high` in the paper; None leaves the endpoint's default.
    `store` keeps replies, so that none is paid for twice.

    Raises:
      ValueError: The task does not say what its hooks and observables are.
    """
    prompt.check_described(task)
    self._client, self._task, self._count, self._price = client, task, count, price
    self._effort = {"reasoning_effort": effort} if effort else {}
    self._store = store
    self.name = client.name
    self._unusable = 0

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`; a refused answer is sent back twice, with the reason.

    So is what the free proxy says, if it was asked, and what `Context.tried` tells of
    an answer that would be accepted. There is no further turn once the answer has used
    up the run's tokens or money.

    Raises:
      OutageError: The client has no answer, or too many in a row were unusable.
    """
    context = self._timed(context)
    messages = prompt.messages(context, self._task, count=self._count)
    usage = {"calls": 0, "input_tokens": 0, "output_tokens": 0, "micro_dollars": 0}
    models: list[str] = []
    repairs = asks = turn = 0
    proposal, complaint = None, ""
    while True:
      reply = self._reply(context, turn, self._request(messages))
      turn += 1
      models.append(reply.model)
      usage["calls"] += 1
      usage["input_tokens"] += reply.input_tokens
      usage["output_tokens"] += reply.output_tokens
      usage["micro_dollars"] += self._price(reply)
      try:
        answer = read(reply.text)
        base, parent = context.base.source, context.parent.source
        read_ = answer.proposal(base, self._task.interface, usage, parent=parent)
      except (ValueError, RejectedError) as error:
        complaint = str(error)
      else:
        proposal = dataclasses.replace(read_, models=tuple(models))
        if proposal.finished:
          complaint = ""
          break
        # A question to the proxy is no repair, so it takes none of the repair turns.
        may_ask = context.asks and asks < ASKS and not context.overspends(usage)
        if answer.ask and may_ask:
          asks += 1
          told = context.ask(proposal.source, answer.ask)
          told += " Now answer again, with this program or another, "
          told += (
            "and `ask` once more if you must." if asks < ASKS else "without `ask`."
          )
          if (more := self._turn(context, messages, reply.text, told)) is not None:
            messages = more
            continue
        complaint = context.review(proposal)
        if answer.ask and not context.asks:
          complaint = complaint or "ask: this run has no free proxy; leave it out."
        # What became of an accepted answer is no repair either.
        if not complaint and (told := context.tried(proposal)):
          if (more := self._turn(context, messages, reply.text, told)) is not None:
            messages = more
            continue
      if not complaint or repairs == REPAIRS or context.overspends(usage):
        break
      repairs += 1
      told = f"That was not accepted, and cost no call: {complaint[:3000]} Repair it: "
      told += "answer with the whole object again."
      if (more := self._turn(context, messages, reply.text, told)) is None:
        complaint += " The reply is too long for a repair turn."
        break
      messages = more
    if proposal is not None:
      # What is still refused is booked by the search, with its own words.
      self._unusable = 0
      return dataclasses.replace(proposal, usage=usage, models=tuple(models))
    self._unusable += 1
    if self._unusable >= UNUSABLE_IN_A_ROW:
      raise OutageError(
        f"llm: {self._unusable} answers of {self.name} in a row were no proposals; the "
        f"last: {complaint[:200]!r}; choose another model."
      )
    # The search books this as a refused proposal: proposer calls, no evaluator call.
    return Proposal(
      source="",
      label="unusable answer",
      usage=usage,
      models=tuple(models),
      unusable=complaint[:3000],
    )

  def _timed(self, context: Context) -> Context:
    """Returns a context whose seconds are those of the machine that a cassette has.

    Seconds differ from machine to machine, and requests must not.
    """
    if context.seconds is None or not isinstance(self._client, Cassette):
      return context
    untimed = dataclasses.replace(context, seconds=None)
    request = self._request(prompt.messages(untimed, self._task, count=self._count))
    seconds = self._client.seconds(request, context.seconds)
    return dataclasses.replace(context, seconds=seconds)

  def _turn(
    self, context: Context, messages: list[dict[str, str]], answer: str, told: str
  ) -> list[dict[str, str]] | None:
    """Returns the messages with one more turn, or None if it does not fit."""
    # All but the system message and the prompt, which is built anew: with less memory,
    # so that the turns fit.
    later = [
      *messages[2:],
      {"role": "assistant", "content": answer},
      {"role": "user", "content": told},
    ]
    size = sum(self._count(message["content"]) for message in later)
    try:
      first = prompt.messages(context, self._task, count=self._count, reserve=size)
    except ValueError:
      return None
    return [*first, *later]

  def _reply(self, context: Context, turn: int, request: dict[str, Any]) -> Reply:
    """Returns a reply, from the run folder if it was paid for before."""
    if self._store is None:
      return self._client.complete(request)
    number, position = context.address
    # With the request, so that another prompt in the same place has a reply of its own.
    key = f"{number:05d}-{position}-{turn}-{identity.digest(request)[:12]}"
    stored = self._store.get("replies", key)
    if stored is None:
      stored = self._client.complete(request).model_dump()
      self._store.put("replies", key, stored)
    return Reply(**stored)

  def _request(self, messages: list[dict[str, str]]) -> dict[str, Any]:
    schema = {"name": "proposal", "schema": Answer.model_json_schema()}
    return {
      "messages": messages,
      "response_format": {"type": "json_schema", "json_schema": schema},
      **self._effort,
    }
