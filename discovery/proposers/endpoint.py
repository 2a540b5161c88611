"""Client for OpenAI-compatible endpoints, and cassettes that record its replies."""

import base64
import contextlib
import copy
import dataclasses
import email.utils
import functools
import json
import logging
import os
import pathlib
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

import pydantic

from mxjax.discovery.core import identity
from mxjax.discovery.core.proposal import OutageError
from mxjax.errors import FileNotFoundRefusal, ValueRefusal

# Statuses that may be over in a moment: timeouts, limits of rate, failing servers.
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_REPLY_BYTES = 16 << 20
MAX_TOKENS = 1 << 40
"""Of one reply, so that a price of it is a number."""
PROBE_SECONDS = 10.0
LOADING = 503
"""What a local server answers while it loads its model."""
SECRET_LENGTH = 8
"""Keys shorter than this, such as the `EMPTY` of a local server, are not cut out."""
BEGINNINGS = (b'{"reply": ', b'{"seconds": ')
"""Of a line of a cassette, by which one that was being written is known."""
LOG = logging.getLogger(__name__)


class Reply(pydantic.BaseModel, extra="forbid", strict=True):
  """An endpoint's reply, as stored in cassettes; token counts are as billed.

  `model` is the model that the endpoint says answered.
  """

  text: str
  model: str
  finish_reason: str
  input_tokens: int = pydantic.Field(ge=0, le=MAX_TOKENS)
  output_tokens: int = pydantic.Field(ge=0, le=MAX_TOKENS)
  attempts: int = 1


class Client(Protocol):
  """Sends one request and returns one reply."""

  @property
  def name(self) -> str:
    """Name used in the proposer's name."""

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """Sends a chat-completion request.

    Raises:
      OutageError: There was no usable answer within the deadline.
    """


class _Loading(Exception):
  """Cause of an outage of a server that was loading its model."""


class _Connection:
  """One HTTP client, kept over requests, whose reads end at a deadline."""

  def __init__(self) -> None:
    import httpx

    # One connection, so that the socket that `_cut` shuts down is that of the request.
    limits = httpx.Limits(max_connections=1)
    self.client = httpx.Client(follow_redirects=False, limits=limits)
    self._socket: Any = None

  def _opened(self, event: str, info: Mapping[str, Any]) -> None:
    if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
      self._socket = info["return_value"].get_extra_info("socket")

  def _cut(self) -> None:
    if self._socket is not None:
      with contextlib.suppress(OSError):
        # Closing would leave a read in another thread waiting; shutting down ends it.
        self._socket.shutdown(socket.SHUT_RDWR)

  def post(
    self, url: str, body: Any, headers: Mapping[str, str], end: float
  ) -> tuple[int, Mapping[str, str], bytes]:
    """Returns status, headers and body, within the deadline and the size limit.

    Raises:
      OutageError: The reply is too long or compressed.
      httpx.TransportError: There is none in time.
    """
    import httpx

    left, data = max(end - time.monotonic(), 0.001), bytearray()
    # The timeouts of the library begin again with every byte that arrives.
    cutter = threading.Timer(left, self._cut)
    # A process that ends must not wait for the deadline.
    cutter.daemon = True
    cutter.start()
    more = {"extensions": {"trace": self._opened}, "timeout": left}
    try:
      with self.client.stream("POST", url, json=body, headers=headers, **more) as got:
        if got.headers.get("Content-Encoding", "identity") != "identity":
          raise OutageError(
            "endpoint: the reply is compressed, which was not asked for."
          )
        for chunk in got.iter_raw(1 << 16):
          data += chunk
          if len(data) > MAX_REPLY_BYTES:
            raise OutageError(
              f"endpoint: a reply of more than {MAX_REPLY_BYTES} bytes; ask for less."
            )
        # A body without a declared length ends where it was cut, as a whole one does.
        if time.monotonic() >= end:
          raise httpx.ReadTimeout("cut off")
        return got.status_code, got.headers, bytes(data)
    except httpx.TransportError as error:
      if time.monotonic() >= end:
        raise httpx.ReadTimeout(
          "the reply was still coming in at the deadline"
        ) from error
      raise
    finally:
      cutter.cancel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpClient:
  """Client of an OpenAI-compatible `/chat/completions` endpoint.

  Redirects are not followed, so the key goes to `base_url` alone, and it is cut out of
  everything that comes back. Retries are logged as warnings. Several threads may ask at
  the same time, each over a connection of its own.

  Attributes:
    base_url: Such as `http://localhost:8000/v1`, without credentials.
    key_variable: Environment variable with the API key; the key is never recorded.
    deadline: Seconds for a request with all its retries.
    pause: Seconds before the first retry; doubles on each retry, with jitter.
    metered: Whether a reply must say how many tokens it took, as budgets need.
  """

  base_url: str
  model: str
  key_variable: str = "OPENAI_API_KEY"
  deadline: float = 600.0
  pause: float = 1.0
  metered: bool = False

  @property
  def name(self) -> str:
    """Names the model, in results."""
    return f"llm:{self.model}"

  @functools.cached_property
  def _of_threads(self) -> threading.local:
    return threading.local()

  @property
  def _kept(self) -> _Connection:
    """This thread's connection: one has a deadline, and so one request, at a time."""
    mine = self._of_threads
    if not hasattr(mine, "connection"):
      mine.connection = _Connection()
      # It ends with its thread, or with the client.
      weakref.finalize(mine.connection, mine.connection.client.close)
    return mine.connection

  def probe(self, seconds: float = PROBE_SECONDS) -> Reply | None:
    """Asks for one word within `seconds`; returns None if none came in that time.

    A local server that still loads its model, or a model that reasons at length, is
    slow to begin with, and no failure; a refused connection, key or address is one.

    Raises:
      OutageError: The endpoint is not there, or refuses the request.
    """
    import httpx

    quick = dataclasses.replace(self, deadline=min(self.deadline, seconds))
    try:
      return quick.complete({"messages": [{"role": "user", "content": "Say yes."}]})
    except OutageError as error:
      cause = error.__cause__
      if isinstance(cause, httpx.ReadTimeout | _Loading):
        return None
      raise

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """See `Client.complete`; retries temporary errors and obeys Retry-After."""
    import httpx

    end, attempt, secrets = time.monotonic() + self.deadline, 0, self._secrets()
    body = {**request, "model": self.model}
    while True:
      attempt += 1
      after, cause = "", None
      try:
        code, headers, data = self._kept.post(self._url(), body, self._headers(), end)
        data = _without(data, secrets)
        if httpx.codes.is_success(code):
          # Gateways put the error of a provider behind them into a reply of their own.
          if (inside := _error_inside(data)) is None:
            return self._reply(data, attempt)
          code = inside
        if code not in RETRIED:
          raise OutageError(
            f"endpoint: {self.base_url} answered HTTP {code}: {_shown(data)}; "
            + ("give the address it leads to." if 300 <= code < 400 else "mend that.")
          )
        reason, after = f"HTTP {code}", headers.get("Retry-After", "")
        cause = _Loading() if code == LOADING else None
      except (httpx.TransportError, httpx.DecodingError) as error:
        reason = _without(f"{type(error).__name__}: {error}".encode(), secrets).decode()
        cause = error
      # Requests that failed together are tried again apart, and no generator is moved.
      jitter = 0.5 + identity.draw(identity.digest(dict(request)), attempt)
      wait = max(self.pause * 2 ** (attempt - 1) * jitter, _seconds(after))
      if time.monotonic() + wait > end:
        raise OutageError(
          f"endpoint: {self._url()} gave no answer in {attempt} tries within "
          f"{self.deadline:g} s; the last was {reason!r:.300}, and the next would be "
          f"in {wait:.3g} s; check the address and that its server runs, or give it "
          "longer (--deadline, and --probe-seconds before a run; `deadline` in a plan)."
        ) from cause
      LOG.warning("endpoint: %.300r; try %d in %.1f s", reason, attempt + 1, wait)
      time.sleep(wait)

  def _url(self) -> str:
    import httpx

    try:
      url = httpx.URL(f"{self.base_url.rstrip('/')}/chat/completions")
    except httpx.InvalidURL as error:
      raise OutageError(f"endpoint: {self.base_url!r:.200}: {error}.") from None
    if url.scheme not in ("http", "https") or not re.fullmatch(r"[\w.:-]+", url.host):
      raise OutageError(
        f"endpoint: expected http(s)://host/..., got {self.base_url!r:.200}."
      )
    if url.userinfo or url.query or url.fragment:
      raise OutageError(
        "endpoint: expected an address without credentials, query or fragment, which "
        f"would be recorded; put the key into {self.key_variable}."
      )
    return str(url)

  def _headers(self) -> dict[str, str]:
    key = os.environ.get(self.key_variable, "")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
      # The HTTP library would quote the key in its own error message.
      raise OutageError(
        f"endpoint: {self.key_variable} holds characters that no HTTP header can; set "
        "it again without line breaks or spaces at its ends."
      )
    # Compressed replies could be of any size once read.
    headers = {"Accept-Encoding": "identity"}
    return {**headers, "Authorization": f"Bearer {key}"} if key else headers

  def _secrets(self) -> list[bytes]:
    """Returns the forms of the key that a reply might hold; none of a short key."""
    key = os.environ.get(self.key_variable, "")
    if len(key) < SECRET_LENGTH:
      return []
    forms = {key, urllib.parse.quote(key, safe=""), json.dumps(key)[1:-1]}
    encoded = base64.b64encode(key.encode(errors="replace"))
    return sorted({*(form.encode(errors="replace") for form in forms), encoded})

  def _reply(self, data: bytes, attempt: int) -> Reply:
    try:
      body = json.loads(data)
      choice, usage = body["choices"][0], body.get("usage") or {}
      # No prompt has 0 tokens, but a reply may be empty.
      if self.metered and not (
        usage.get("prompt_tokens") and usage.get("completion_tokens") is not None
      ):
        raise OutageError(
          f"endpoint: {self.base_url} does not say how many tokens a reply took, got "
          f"{usage!r:.200}; run without --max-tokens and --max-cost, or ask another."
        )
      reply = Reply(
        text=_text(choice["message"]["content"]),
        model=body.get("model") or self.model,
        finish_reason=choice.get("finish_reason") or "",
        input_tokens=_tokens(usage.get("prompt_tokens")),
        output_tokens=_tokens(usage.get("completion_tokens")),
        attempts=attempt,
      )
      # Half a surrogate pair is JSON, but no text that a file or a request can hold.
      f"{reply.text}{reply.model}{reply.finish_reason}".encode()
      return reply
    except (
      ValueError,
      KeyError,
      IndexError,
      TypeError,
      AttributeError,
      RecursionError,
    ):
      raise OutageError(
        f"endpoint: {self.base_url} answered no chat completion: {_shown(data)}; check "
        "that the address ends before /chat/completions."
      ) from None


def _error_inside(data: bytes) -> int | None:
  """Returns the status of an error in a body that says it is none, or None.

  An empty list of choices counts as 502: the provider gave nothing.
  """
  try:
    body = json.loads(data)
  except (ValueError, RecursionError):
    return None
  if not isinstance(body, dict):
    return None
  error = body.get("error")
  if isinstance(error, dict) and not body.get("choices"):
    code = error.get("code")
    return code if isinstance(code, int) and not isinstance(code, bool) else 500
  return 502 if body.get("choices") == [] else None


def _text(content: Any) -> str:
  """Returns the text of a message, which may be a list of parts."""
  if isinstance(content, list):
    texts = [part["text"] for part in content if part.get("type") == "text"]
    return "".join(texts)
  return content or ""


def _tokens(count: Any) -> Any:
  """Returns a count of tokens as an integer where it is one; null is 0."""
  if count is None:
    return 0
  return int(count) if isinstance(count, float) and count.is_integer() else count


def _without(data: bytes, secrets: Iterable[bytes]) -> bytes:
  for secret in secrets:
    data = data.replace(secret, b"[key]")
  return data


def _shown(data: bytes) -> str:
  """Returns the beginning of a body in a form that a terminal and a log can print."""
  return repr(data[:300].decode(errors="replace"))


def _seconds(after: str) -> float:
  """Returns the seconds of a Retry-After header; 0 if it is neither number nor date."""
  if re.fullmatch(r"[0-9]{1,9}", after):
    return float(after)
  try:
    return max(email.utils.parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
  except (ValueError, OverflowError):
    return 0.0


class Cassette:
  """Recorded replies, addressed by the hash of their request and their sample number.

  Replay fails closed: a request that was not recorded is an error, never a live call or
  the nearest match. A replayed run shows that the code path reproduces; it is not a new
  sample. Of one request there may be several replies, each a sample with a number of
  its own; see `sampled`. Several threads may use one cassette.

  How long the recording machine took is kept too, where a request tells it, so that
  every machine sends the same requests; see `seconds`.
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
      ValueError: It is no cassette.
    """
    self._path, self._mode, self._client = pathlib.Path(path), mode, client
    self._replies: dict[tuple[str, int], Reply] = {}
    self._seconds: dict[str, Mapping[str, float]] = {}
    self._sample = 0
    # One for all samples: of the file, and of what has been read from it.
    self._lock = threading.Lock()
    if self._path.exists():
      self._read()
    elif mode == "replay":
      raise FileNotFoundRefusal(
        "cassette",
        expected="a file to replay",
        got=f"no {path}",
        mend="record one first",
      )

  def _read(self) -> None:
    *whole, torn = self._path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
      try:
        entry = json.loads(line)
        if "seconds" in entry:
          told = {name: float(each) for name, each in entry["seconds"].items()}
          self._seconds[entry["untimed"]] = told
        else:
          key = (entry["request"], entry.get("sample", 0))
          self._replies[key] = Reply(**entry["reply"])
      except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise self._no_cassette(number, line) from None
    if not any(torn[: len(b)] == b[: len(torn)] for b in BEGINNINGS):
      raise self._no_cassette(len(whole) + 1, torn)
    if torn and self._mode == "record":
      # The recorder was killed while it wrote; the run folder may hold the reply.
      os.truncate(self._path, self._path.stat().st_size - len(torn))

  def _no_cassette(self, number: int, line: bytes) -> ValueRefusal:
    return ValueRefusal(
      f"cassette: {self._path}",
      expected=f"a recorded reply in line {number}",
      got=_shown(line),
      mend="name a file that --cassette recorded, or a new one",
    )

  @property
  def name(self) -> str:
    """Names the model while it records, and the file when it replays."""
    if self._mode == "record" and self._client is not None:
      return self._client.name
    return f"cassette:{identity.digest(self._path.read_bytes())[:12]}"

  def sampled(self, number: int) -> "Cassette":
    """Returns this cassette for the sample `number` of every request, from 0.

    Samples of one request are separate replies: each is asked for and recorded once,
    and replayed by its number, in whatever order and from whatever thread.
    """
    # A shallow copy: the replies, the file and the lock are those of all samples.
    other = copy.copy(self)
    other._sample = number
    return other

  def asking(self, client: Client) -> "Cassette":
    """Returns this cassette with another client to ask for what is not recorded."""
    other = copy.copy(self)
    other._client = client
    return other

  def seconds(
    self, untimed: Mapping[str, Any], measured: Mapping[str, float]
  ) -> Mapping[str, float]:
    """Returns the seconds that a request is to tell, as the recording machine had them.

    They are by part of a call, and so are the `measured` ones of this machine.
    `untimed` is the request without them, which addresses them.

    Raises:
      OutageError: There are none to replay.
    """
    key = identity.digest(dict(untimed))
    with self._lock:
      if key in self._seconds:
        return self._seconds[key]
      if self._mode == "replay":
        raise self._absent(f"seconds for request {key[:12]}")
      self._append({"seconds": dict(measured), "untimed": key})
      self._seconds[key] = dict(measured)
    return measured

  def complete(self, request: Mapping[str, Any]) -> Reply:
    """Returns the recorded reply of this sample, or asks for it and records it."""
    digest = identity.digest(dict(request))
    key = (digest, self._sample)
    with self._lock:
      if key in self._replies:
        return self._replies[key]
    if self._mode == "replay" or self._client is None:
      told = f", sample {self._sample}" if self._sample else ""
      raise self._absent(f"reply to request {digest[:12]}{told}")
    # Without the lock, so that other threads ask at the same time.
    reply = self._client.complete(request)
    entry = {"request": digest, "time": time.time(), "reply": reply.model_dump()}
    if self._sample:
      entry["sample"] = self._sample
    with self._lock:
      # Another thread may have asked for the same sample meanwhile: the first counts.
      if key not in self._replies:
        self._append(entry)
        self._replies[key] = reply
      return self._replies[key]

  def _absent(self, what: str) -> OutageError:
    return OutageError(
      f"cassette: {self._path} holds no {what}; record again, or replay with the "
      "version and configuration that recorded it."
    )

  def _append(self, entry: Mapping[str, Any]) -> None:
    with self._path.open("a", encoding="utf-8") as file:
      # Sorted keys make every line begin with one of `BEGINNINGS`.
      file.write(json.dumps(entry, sort_keys=True) + "\n")
      file.flush()
      # What was paid for is on the disk before anybody uses it.
      os.fsync(file.fileno())
