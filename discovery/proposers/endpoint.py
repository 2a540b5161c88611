"""Any OpenAI-compatible endpoint as a proposer, and cassettes of its answers."""

import dataclasses
import json
import os
import pathlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import pydantic

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import RejectedError, admit
from mxjax.discovery.core.proposal import Context, Proposal, ProposerError
from mxjax.discovery.core.residual import Control, Explanation
from mxjax.discovery.core.task import Task
from mxjax.discovery.proposers import prompt

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


class Reply(pydantic.BaseModel, extra="forbid", strict=True):
  """What the endpoint answered, as it is kept in cassettes.

  Attributes:
    text: The message.
    model: The model that says it answered.
    finish_reason: Why it stopped.
    input_tokens: As billed.
    output_tokens: As billed.
    attempts: Requests that were sent.
  """

  text: str
  model: str
  finish_reason: str
  input_tokens: int
  output_tokens: int
  attempts: int = 1


class Client(Protocol):
  """One request, one reply."""

  @property
  def name(self) -> str:
    """Goes into the proposer's name."""
    ...

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """Sends a chat-completion request.

    Raises:
      ProposerError: No usable answer within the deadline.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpClient:
  """An OpenAI-compatible `/chat/completions`.

  Attributes:
    base_url: Such as `http://localhost:8000/v1`.
    model: The model to ask for.
    key_variable: Environment variable with the key; it never enters a record.
    deadline: Seconds for a request with all its retries.
    pause: Seconds before the first retry; doubles, with jitter.
  """

  base_url: str
  model: str
  key_variable: str = "OPENAI_API_KEY"
  deadline: float = 600.0
  pause: float = 1.0

  @property
  def name(self) -> str:
    """See `Client`."""
    return f"llm:{self.model}"

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """See `Client.complete`; retries what may pass, and obeys Retry-After."""
    end = time.monotonic() + self.deadline
    attempt = 0
    while True:
      attempt += 1
      left = end - time.monotonic()
      try:
        return self._once(request, max(left, 0.001), attempt)
      except urllib.error.HTTPError as error:
        with error:
          detail = error.read(500).decode(errors="replace")
          after = error.headers.get("Retry-After")
        if error.code not in RETRIED:
          raise ProposerError(f"endpoint: HTTP {error.code}: {detail}") from error
        reason = f"HTTP {error.code}"
      except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason, after = str(error), None
      jitter = 0.5 + identity.draw(identity.digest(dict(request)), attempt)
      wait = self.pause * 2 ** (attempt - 1) * jitter
      if after is not None and after.isdigit():
        wait = max(wait, float(after))
      if time.monotonic() + wait > end:
        raise ProposerError(
          f"endpoint: {self.base_url} gave no answer in {attempt} tries within "
          f"{self.deadline:g} s; the last was {reason}."
        )
      time.sleep(wait)

  def _once(self, request: Mapping[str, Any], left: float, attempt: int) -> Reply:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(self.key_variable):
      headers["Authorization"] = f"Bearer {key}"
    sent = urllib.request.Request(
      f"{self.base_url.rstrip('/')}/chat/completions",
      data=json.dumps({**request, "model": self.model}).encode(),
      headers=headers,
    )
    with urllib.request.urlopen(sent, timeout=left) as response:
      body = json.loads(response.read())
    try:
      choice, usage = body["choices"][0], body.get("usage") or {}
      return Reply(
        text=choice["message"]["content"] or "",
        model=body.get("model", self.model),
        finish_reason=choice.get("finish_reason") or "",
        input_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        attempts=attempt,
      )
    except (KeyError, IndexError, TypeError) as error:
      raise ProposerError(f"endpoint: not a chat completion: {body!r:.300}") from error


class Cassette:
  """Recorded replies by the hash of their request.

  Replay fails closed: a request that was not recorded is an error, never a live call
  and never the nearest match. A replayed run shows that the code path reproduces; it
  is not a new sample.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    mode: Literal["record", "replay"],
    client: Client | None = None,
  ) -> None:
    """Opens a cassette.

    Args:
      path: A JSON-lines file.
      mode: `record` asks the client and appends, `replay` only reads.
      client: Needed to record.
    """
    self._path, self._mode, self._client = pathlib.Path(path), mode, client
    self._replies: dict[str, Reply] = {}
    if self._path.exists():
      for line in self._path.read_text().splitlines():
        entry = json.loads(line)
        self._replies[entry["request"]] = Reply(**entry["reply"])
    elif mode == "replay":
      raise FileNotFoundError(f"cassette: there is no {path} to replay.")

  @property
  def name(self) -> str:
    """See `Client`."""
    if self._mode == "record" and self._client is not None:
      return self._client.name
    return f"cassette:{identity.digest(self._path.read_bytes())[:12]}"

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """See `Client.complete`."""
    key = identity.digest(dict(request))
    if key in self._replies:
      return self._replies[key]
    if self._mode == "replay" or self._client is None:
      raise ProposerError(
        f"cassette: {self._path} holds no reply to request {key[:12]}; record again, "
        "or replay with the version and configuration that recorded it."
      )
    reply = self._client.complete(request)
    entry = {"request": key, "time": time.time(), "reply": reply.model_dump()}
    with self._path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(entry, sort_keys=True) + "\n")
      file.flush()
      os.fsync(file.fileno())
    self._replies[key] = reply
    return reply


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
  """The structured output asked of a model."""

  source: str
  label: str
  note: str = ""
  residual: str | None = None
  explanations: list[_Explanation] = []
  controls: list[_Control] = []
  declared: list[str] = []


def _json_of(text: str) -> str:
  """The JSON object of a reply: the whole, or the inside of its fence."""
  if "```" not in text:
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
  ) -> None:
    """Sets up.

    Args:
      client: Endpoint or cassette.
      task: For its interface, interventions and margins.
      count: Token counter.
      price: Cost of a reply in micro-dollars.
    """
    self._client, self._task, self._count, self._price = client, task, count, price
    self.name = client.name

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`: an answer that does not admit is repaired once."""
    task = self._task
    messages = prompt.messages(
      context,
      task.interface,
      dict(task.interventions),
      dict(task.margins),
      count=self._count,
    )
    usage = {"calls": 0, "input_tokens": 0, "output_tokens": 0, "micro_dollars": 0}
    complaint = ""
    for _ in range(2):
      reply = self._client.complete(self._request(messages))
      usage["calls"] += 1
      usage["input_tokens"] += reply.input_tokens
      usage["output_tokens"] += reply.output_tokens
      usage["micro_dollars"] += self._price(reply)
      try:
        answer = Answer.model_validate_json(_json_of(reply.text))
        controls = tuple(Control(**c.model_dump()) for c in answer.controls)
        admit(answer.source, task.interface)
        break
      except (pydantic.ValidationError, RejectedError, ValueError) as error:
        complaint = str(error)[:2000]
        messages = [
          *messages,
          {"role": "assistant", "content": reply.text},
          {"role": "user", "content": f"That was not accepted: {complaint} Repair it."},
        ]
    else:
      # The search books it as a rejected proposal: proposer calls, no evaluator call.
      return Proposal(source="", label="unusable answer", note=complaint, usage=usage)
    return Proposal(
      source=answer.source,
      label=answer.label,
      note=answer.note,
      residual=answer.residual,
      explanations=tuple(Explanation(**e.model_dump()) for e in answer.explanations),
      controls=controls,
      declared=tuple(answer.declared),
      usage=usage,
    )

  def _request(self, messages: list[dict[str, str]]) -> dict[str, Any]:
    schema = {"name": "proposal", "schema": Answer.model_json_schema()}
    return {
      "messages": messages,
      "response_format": {"type": "json_schema", "json_schema": schema},
    }
