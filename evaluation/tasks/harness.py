"""Makes mxjax a model of EleutherAI's lm-evaluation-harness.

The harness looks up models in a registry of its own process, so this module registers
`mxjax` and then calls the harness's command line:

  mxjax-lm-eval --model mxjax --model_args checkpoint=runs/smollm2 --tasks arc_easy

`python -m mxjax.evaluation.tasks.harness` takes the same arguments. Requires the extra
`mxjax[harness]`.
"""

from typing import Any

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

MAX_NEW_TOKENS = 256
"""Tokens to generate if a task does not say how many."""


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
    self.max_length = int(max_length or self.model.config.max_positions)

  @property
  def tokenizer_name(self) -> str:
    """Key of the harness's caches."""
    return self.tokenizer.fingerprint

  def _score(self, requests: list[likelihoods.Request]) -> list[likelihoods.Score]:
    longest = self.max_length
    return likelihoods.score(self.model, self.params, requests, max_length=longest)

  def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
    """Scores each (context, continuation): log-likelihood and whether it is greedy."""
    pairs = [
      multiple_choice.encode_pair(self.tokenizer, *request.args) for request in requests
    ]
    return [(s.log_likelihood, s.is_greedy) for s in self._score(pairs)]

  def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
    """Returns the log-likelihoods of whole texts, predicting each token once."""
    config = self.model.config
    start = [*self.tokenizer.prefix_ids, *config.eos_ids][:1]
    windows, owners = [], []
    for owner, request in enumerate(requests):
      ids = self.tokenizer.encode(request.args[0]).tolist()
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
    np.add.at(totals, owners, [s.log_likelihood for s in self._score(windows)])
    return totals.tolist()

  def generate_until(self, requests: list[Instance]) -> list[str]:
    """Generates greedily and cuts at the first stop text."""
    return [self._generate(*request.args) for request in requests]

  def _generate(self, context: str, settings: dict[str, Any]) -> str:
    new = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
    prefix = np.asarray(self.tokenizer.prefix_ids, np.int32)
    ids = np.concatenate([prefix, self.tokenizer.encode(context)])
    ids = ids[-(self.max_length - new) :]
    output = models.generate(
      self.model,
      self.params,
      ids[None],
      max_new_tokens=new,
      eos_id=self.tokenizer.eos_id,
    )
    text = self.tokenizer.decode(np.asarray(output[0, len(ids) :]))
    stops = settings.get("until") or []
    for stop in [stops] if isinstance(stops, str) else stops:
      text = text.split(stop)[0]
    return text


def main() -> None:
  """Runs the harness's command line, with `mxjax` among its models."""
  from lm_eval.__main__ import (  # pyright: ignore[reportMissingImports]
    cli_evaluate,
  )

  cli_evaluate()


if __name__ == "__main__":
  main()
