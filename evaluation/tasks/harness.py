"""Makes mxjax a model of EleutherAI's lm-evaluation-harness.

The harness looks up models in a registry of its own process, so this module registers
`mxjax` and then calls the harness's command line:

  mxjax-lm-eval --model mxjax --model_args checkpoint=runs/smollm2 --tasks arc_easy

`python -m mxjax.evaluation.tasks.harness` takes the same arguments. Requires the extra
`mxjax[harness]`.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax

# Fills the registry, which the harness does itself only while it is empty.
import lm_eval.models  # noqa: F401  # pyright: ignore[reportMissingImports]
import numpy as np
from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import (  # pyright: ignore[reportMissingImports]
  register_model,
)

from mxjax import models
from mxjax.errors import ValueRefusal
from mxjax.evaluation import subjects
from mxjax.evaluation.tasks import likelihoods, multiple_choice
from mxjax.models.tokenizer import encode_prompt

MAX_NEW_TOKENS = 256
"""Tokens to generate if a task does not say how many, as in the harness."""
MAX_NEW_NAMES = "max_gen_toks max_new_tokens max_tokens max_completion_tokens".split()
"""Names of that number in a task's settings; the first of them that is there counts."""
GENERATION = {*MAX_NEW_NAMES, "until", "do_sample", "temperature", "top_k", "top_p"}
"""Settings of generation that are followed."""
PLAIN = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
"""Settings that are accepted at the value at which they do nothing."""

_log = logging.getLogger(__name__)


@register_model("mxjax")
class MxjaxLM(LM):
  """A float or quantized model behind the harness's interface."""

  def __init__(
    self,
    checkpoint: str | None = None,
    pretrained: str | None = None,
    dtype: str | None = None,
    max_length: int | str | None = None,
    batch_size: int | str | None = None,
    device: str | None = None,
    **unknown: Any,
  ) -> None:
    """Loads a checkpoint folder of `mxjax quantize`, or a float model.

    `pretrained` is a float model that `from_pretrained` accepts; if neither is given,
    the embedded SmolLM2. `dtype` is the compute dtype of a float model, by default
    that of `models.default_dtype`; a checkpoint has that of its build. `max_length`
    limits the positions; None uses the model's own. `batch_size` and `device` come
    from the harness and are ignored: batches are formed by length, and JAX chooses
    the device.

    Raises:
      ValueError: Arguments are unknown, two models are given, or a checkpoint was built
        in another dtype.
    """
    super().__init__()
    del batch_size, device
    if unknown or (checkpoint and pretrained):
      raise ValueRefusal(
        "mxjax-lm-eval",
        expected="model_args checkpoint or pretrained, dtype and max_length",
        got=", ".join(unknown) or "both models",
        mend="correct --model_args",
      )
    source = checkpoint or pretrained
    self.model, self.params, self.tokenizer = subjects.restore(source, dtype=dtype)
    positions = self.model.config.max_positions
    self.max_length = positions if max_length is None else int(max_length)
    if not 1 <= self.max_length <= positions:
      raise ValueRefusal(
        "mxjax-lm-eval",
        expected=f"max_length from 1 to the model's {positions} positions",
        got=self.max_length,
        mend="correct --model_args",
      )
    self._template: str | None = None
    self._generated, self._has_cut = 0, False

  @property
  def tokenizer_name(self) -> str:
    """Key of the harness's caches."""
    return self.tokenizer.fingerprint

  def chat_template(self, chat_template: bool | str = False) -> str:
    """Returns the template that `apply_chat_template` uses, by name if it is a text."""
    if not chat_template:
      return ""
    self._template = chat_template if isinstance(chat_template, str) else None
    return self.tokenizer.template(self._template)

  def apply_chat_template(
    self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """Renders messages by the model's chat template."""
    return self.tokenizer.chat_prompt(
      chat_history,
      template=self._template,
      add_generation_prompt=add_generation_prompt,
    )

  @property
  def _first_id(self) -> list[int]:
    """The token that stands for an empty context: BOS, or else EOS."""
    ids = (self.tokenizer.bos_id, self.tokenizer.eos_id, *self.model.config.eos_ids)
    return [one for one in ids if one is not None][:1]

  def _score(self, requests: list[likelihoods.Request]) -> list[likelihoods.Score]:
    longest = self.max_length
    # The last token is predicted and not read.
    sizes = [len(context) + len(rest) - 1 for context, rest in requests]
    if cut := sum(size > longest for size in sizes):
      _log.warning(
        "%d of %d requests have more than the model's %d tokens (up to %d): their "
        "oldest tokens are cut",
        cut,
        len(sizes),
        longest,
        max(sizes),
      )
    return likelihoods.score(self.model, self.params, requests, max_length=longest)

  def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
    """Scores each (context, continuation): log-likelihood and whether it is greedy."""
    pairs = [self._pair(*request.args) for request in requests]
    return [(s.log_likelihood, s.is_greedy) for s in self._score(pairs)]

  def _pair(self, context: str, continuation: str) -> likelihoods.Request:
    if context:
      return multiple_choice.encode_pair(self.tokenizer, context, continuation)
    ids = self.tokenizer.encode(continuation)
    # A tokenizer may have put it there itself.
    if ids[:1].tolist() != self._first_id:
      ids = np.concatenate([np.asarray(self._first_id, np.int32), ids])
    if len(ids) < 2:
      raise ValueRefusal(
        "mxjax-lm-eval",
        expected="a continuation of at least one token behind BOS or EOS",
        got=repr(continuation),
        mend="both must be there",
      )
    return likelihoods.Request(ids[:1], ids[1:])

  def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
    """Returns the log-likelihoods of whole texts, predicting each token once."""
    start = self._first_id
    windows, owners = [], []
    for owner, request in enumerate(requests):
      if not (ids := self.tokenizer.encode(request.args[0]).tolist()):
        continue
      rolling = utils.get_rolling_token_windows(
        token_list=ids,
        prefix_token=start[0] if start else ids[0],
        max_seq_len=self.max_length,
        context_len=1,
      )
      for context, continuation in map(utils.make_disjoint_window, rolling):
        pair = (np.asarray(part, np.int32) for part in (context, continuation))
        windows.append(likelihoods.Request(*pair))
        owners.append(owner)
    totals = np.zeros(len(requests))
    # A text has several windows, of which `totals[owners] +=` would count one.
    np.add.at(totals, owners, [s.log_likelihood for s in self._score(windows)])
    return totals.tolist()

  def generate_until(self, requests: list[Instance]) -> list[str]:
    """Generates, greedily unless a task samples, up to the first stop.

    A stop is a text of the task's `until` or an id that ends a text by the config, the
    generation config or the tokenizer; the answer is what precedes it, without special
    tokens. As in the harness, a context is cut on the left to leave room for
    `max_gen_toks`.

    Raises:
      ValueError: `max_gen_toks` leaves no room, or a setting is not supported.
    """
    return [self._generate(*request.args) for request in requests]

  def _generate(self, context: str, settings: dict[str, Any]) -> str:
    unknown = {
      name: value
      for name, value in settings.items()
      if name not in GENERATION and value is not None and PLAIN.get(name) != value
    }
    if unknown:
      raise ValueRefusal(
        "mxjax-lm-eval",
        expected=f"generation settings of {', '.join(sorted(GENERATION))}",
        got=f"{', '.join((f'{k}={v!r}' for k, v in unknown.items()))}",
        mend="leave them out",
      )
    given = [settings[name] for name in MAX_NEW_NAMES if settings.get(name) is not None]
    new = int(given[0]) if given else MAX_NEW_TOKENS
    if not 1 <= new < self.max_length:
      raise ValueRefusal(
        "mxjax-lm-eval",
        expected=f"max_gen_toks from 1 to {self.max_length - 1}, so that a context "
        f"fits into {self.max_length} positions",
        got=new,
        mend="ask for fewer with --gen_kwargs",
      )
    ids = encode_prompt(self.tokenizer, context)
    # A model continues at least one token.
    if not len(ids):
      ids = np.asarray(self._first_id, np.int32)
    if len(ids) > (room := self.max_length - new):
      if not self._has_cut:
        _log.warning(
          "a context of %d tokens leaves no room for %d new ones in %d positions: its "
          "first %d are cut, and so with longer ones, of which nothing more is said",
          len(ids),
          new,
          self.max_length,
          len(ids) - room,
        )
      self._has_cut = True
      ids = ids[-room:]
    ends = {self.tokenizer.eos_id, *self.model.config.eos_ids} - {None}
    # `generate` refuses ids that the model does not have, and a config may name some.
    ends = sorted(end for end in ends if end < self.model.config.vocab_size)
    output = models.generate(
      self.model,
      self.params,
      ids[None],
      max_new_tokens=new,
      eos_id=ends,
      use_cache=False,  # The contract evaluates without one.
      **self._sampling(settings),
    )
    answer = np.asarray(output[0, len(ids) :])
    # Behind its first end a row is filled up.
    stops = np.flatnonzero(np.isin(answer, ends))
    text = self.tokenizer.decode(answer[: stops[0]] if stops.size else answer)
    until = settings.get("until") or []
    for stop in filter(None, [until] if isinstance(until, str) else until):
      text = text.split(stop)[0]
    # After the stops, which may be such texts.
    for special in self.tokenizer.special_texts:
      text = text.replace(special, "")
    return text

  def _sampling(self, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns how to choose tokens; `do_sample: false` wins over a temperature."""
    temperature = float(settings.get("temperature") or 0.0)
    if temperature <= 0 or settings.get("do_sample") is False:
      return {}
    self._generated += 1
    return {
      "temperature": temperature,
      "top_k": settings.get("top_k") or None,
      "top_p": settings.get("top_p"),
      # Requests draw differently, and the same in every run.
      "key": jax.random.key(self._generated),
    }


def main() -> None:
  """Runs the harness's command line, with `mxjax` among its models."""
  from lm_eval.__main__ import (  # pyright: ignore[reportMissingImports]
    cli_evaluate,
  )

  cli_evaluate()


if __name__ == "__main__":
  main()
