"""Client for OpenAI-compatible endpoints, and cassettes that record its replies."""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import pydantic

from mxjax.discovery.core import identity
from mxjax.discovery.core.proposal import ProposerError

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_REPLY_BYTES = 16 << 20


class Reply(pydantic.BaseModel, extra="forbid", strict=True):
  """An endpoint's reply, as stored in cassettes; token counts are as billed.

  `model` is the model that the endpoint says answered.
  """

  text: str
  model: str
  finish_reason: str
  input_tokens: int
  output_tokens: int
  attempts: int = 1


class Client(Protocol):
  """Sends one request and returns one reply."""

  @property
  def name(self) -> str:
    """Name used in the proposer's name."""

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """Sends a chat-completion request.

    Raises:
      ProposerError: There was no usable answer within the deadline.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpClient:
  """Client of an OpenAI-compatible `/chat/completions` endpoint.

  Attributes:
    base_url: Such as `http://localhost:8000/v1`.
    key_variable: Environment variable with the API key; the key is never recorded.
    deadline: Seconds for a request with all its retries.
    pause: Seconds before the first retry; doubles on each retry, with jitter.
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
    """See `Client.complete`; retries temporary errors and obeys Retry-After."""
    import httpx

    end, attempt = time.monotonic() + self.deadline, 0
    while True:
      attempt += 1
      after = ""
      try:
        code, after, data = self._post(request, end)
        if httpx.codes.is_success(code):
          return self._reply(data, attempt)
        if code not in RETRIED:
          detail = data[:500].decode(errors="replace")
          raise ProposerError(f"endpoint: HTTP {code}: {detail}")
        reason = f"HTTP {code}"
      except httpx.TransportError as error:
        reason = f"{type(error).__name__}: {error}"
      jitter = 0.5 + identity.draw(identity.digest(dict(request)), attempt)
      wait = self.pause * 2 ** (attempt - 1) * jitter
      if after.isdigit():
        wait = max(wait, float(after))
      if time.monotonic() + wait > end:
        raise ProposerError(
          f"endpoint: {self.base_url} gave no answer in {attempt} tries within "
          f"{self.deadline:g} s; the last was {reason}."
        )
      time.sleep(wait)

  def _post(self, request: Mapping[str, Any], end: float) -> tuple[int, str, bytes]:
    """Returns status, Retry-After and body, within the deadline and the size limit."""
    import httpx

    url = f"{self.base_url.rstrip('/')}/chat/completions"
    left, body = max(end - time.monotonic(), 0.001), {**request, "model": self.model}
    sent = httpx.stream("POST", url, json=body, headers=self._headers(), timeout=left)
    data = b""
    with sent as response:
      for chunk in response.iter_bytes():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
          raise ProposerError(f"endpoint: a reply of more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > end:
          raise httpx.ReadTimeout("the reply was still coming in at the deadline")
      return response.status_code, response.headers.get("Retry-After", ""), data

  def _headers(self) -> dict[str, str]:
    key = os.environ.get(self.key_variable, "")
    if not (key.isascii() and key.isprintable()):
      # The HTTP library would quote the key in its own error message.
      raise ProposerError(
        f"endpoint: {self.key_variable} holds characters that no HTTP header can; set "
        "it again without line breaks."
      )
    return {"Authorization": f"Bearer {key}"} if key else {}

  def _reply(self, data: bytes, attempt: int) -> Reply:
    try:
      body = json.loads(data)
      choice, usage = body["choices"][0], body.get("usage") or {}
      return Reply(
        text=choice["message"]["content"] or "",
        model=body.get("model", self.model),
        finish_reason=choice.get("finish_reason") or "",
        input_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        attempts=attempt,
      )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
      raise ProposerError(f"endpoint: not a chat completion: {data!r:.300}") from error


class Cassette:
  """Recorded replies, addressed by the hash of their request.

  Replay fails closed: a request that was not recorded is an error, never a live call or
  the nearest match. A replayed run shows that the code path reproduces; it is not a new
  sample.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    mode: Literal["record", "replay"],
    client: Client | None = None,
  ) -> None:
    """Opens a cassette, which is a JSON-lines file.

    `record` asks `client` and appends its replies; `replay` only reads.

    Raises:
      FileNotFoundError: There is no file to replay.
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
