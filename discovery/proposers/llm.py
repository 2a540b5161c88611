"""A language model as the proposer: sends the prompt and parses the answer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pydantic

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.proposal import Context, OutageError, Proposal
from mxjax.discovery.core.store import Store
from mxjax.discovery.core.task import Task
from mxjax.discovery.proposers import prompt
from mxjax.discovery.proposers.endpoint import Client, Reply

UNUSABLE_IN_A_ROW = 5
"""Proposals without a usable answer after which the model counts as out of order."""


class _Explanation(pydantic.BaseModel, extra="forbid", strict=True):
  name: str
  statement: str = ""
  predictions: dict[str, dict[str, Literal["down", "same", "up"]]]


class _Control(pydantic.BaseModel, extra="forbid", strict=True):
  name: str
  intervention: dict[str, Any]
  cost: int = 1
  statement: str = ""


class Answer(pydantic.BaseModel, extra="forbid", strict=True):
  """The structured output requested from a model."""

  source: str
  label: str
  note: str = ""
  residual: str | None = None
  explanations: list[_Explanation] = []
  controls: list[_Control] = []
  declared: list[str] = []

  def proposal(self, usage: Mapping[str, int]) -> Proposal:
    """Returns the proposal that the answer describes.

    Raises:
      ValueError: The ledger cannot charge a control.
    """
    return Proposal.from_dict({**self.model_dump(), "usage": usage})


def _json_of(text: str) -> str:
  """Extracts the JSON object of a reply: all of it, or the inside of its code fence."""
  if "```" not in text or text.lstrip().startswith("{"):
    return text
  inside = text.split("```")[1]
  return inside.removeprefix("json").strip()


class LlmProposer:
  """Proposals by a language model, with one repair turn."""

  def __init__(
    self,
    client: Client,
    task: Task,
    *,
    count: prompt.Count = prompt.estimated_tokens,
    price: Callable[[Reply], int] = lambda reply: 0,
    effort: str | None = None,
    endpoint: str = "",
    store: Store | None = None,
  ) -> None:
    """Sets up the proposer.

    `client` is an endpoint or a cassette, `count` counts tokens, and `price` returns
    the cost of a reply in micro-dollars. `effort` is the reasoning effort to ask for,
    such as `high` in the paper; None leaves the endpoint's default.
    `endpoint`, if given, is named in each proposal with the models that answered.
    `store` keeps replies, so that none is paid for twice.
    """
    self._client, self._task, self._count, self._price = client, task, count, price
    self._effort = {"reasoning_effort": effort} if effort else {}
    self._endpoint, self._store = endpoint, store
    self.name = client.name
    self._unusable = 0

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`; an answer that is not admitted gets one repair turn.

    There is none once the answer has used up the run's tokens or money.

    Raises:
      OutageError: The client has no answer, or too many in a row were unusable.
    """
    messages = prompt.messages(context, self._task, count=self._count)
    usage = {"calls": 0, "input_tokens": 0, "output_tokens": 0, "micro_dollars": 0}
    complaint = ""
    replies: list[dict[str, str]] = []
    for turn in range(2):
      reply = self._reply(context, turn, self._request(messages))
      if self._endpoint:
        replies.append({"endpoint": self._endpoint, "model": reply.model})
      usage["calls"] += 1
      usage["input_tokens"] += reply.input_tokens
      usage["output_tokens"] += reply.output_tokens
      usage["micro_dollars"] += self._price(reply)
      try:
        proposal = Answer.model_validate_json(_json_of(reply.text)).proposal(usage)
        proposal = dataclasses.replace(proposal, replies=tuple(replies))
        admit(proposal.source, self._task.interface)
        self._unusable = 0
        return proposal
      except ValueError as error:
        complaint = str(error)[:2000]
        if context.overspends(usage):
          break
        repair = [
          {"role": "assistant", "content": reply.text},
          {"role": "user", "content": f"That was not accepted: {complaint} Repair it."},
        ]
        size = sum(self._count(message["content"]) for message in repair)
        try:
          first = prompt.messages(context, self._task, count=self._count, reserve=size)
        except ValueError:
          complaint += " The reply is too long for a repair turn."
          break
        messages = [*first, *repair]
    self._unusable += 1
    if self._unusable >= UNUSABLE_IN_A_ROW:
      raise OutageError(
        f"llm: {self._unusable} answers of {self.name} in a row were no proposals; the "
        f"last: {complaint[:200]!r}; choose another model."
      )
    # The search books this as a rejected proposal: proposer calls, no evaluator call.
    return Proposal(
      source="",
      label="unusable answer",
      note=complaint,
      usage=usage,
      replies=tuple(replies),
    )

  def _reply(self, context: Context, turn: int, request: dict[str, Any]) -> Reply:
    """Returns a reply, from the run folder if it was paid for before."""
    if self._store is None:
      return self._client.complete(request)
    number, position = context.address
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
