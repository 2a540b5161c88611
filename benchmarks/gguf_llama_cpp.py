"""The logits that llama.cpp computes from a GGUF export, beside ours.

  python benchmarks/gguf_llama_cpp.py ours WORK      an environment with mxjax
  python benchmarks/gguf_llama_cpp.py theirs WORK    one with cyllama==0.2.18 and numpy
  python benchmarks/gguf_llama_cpp.py compare WORK   the first again

`ours` exports RTN of the embedded model as it is, and its decoded weights in float32,
and computes logits of a text of the test. `compare` writes results/gguf_llama_cpp.md.
cyllama is a wheel of the package index with llama.cpp inside.
"""

import json
import pathlib
import sys

import numpy as np

RESULT = pathlib.Path(__file__).parent / "results" / "gguf_llama_cpp.md"
TOKENS, VOCABULARY = 128, 49152


def ours(work):
  import jax
  from gguf import GGUFReader
  from gguf.quants import dequantize

  import mxjax
  from mxjax.evaluation.datasets import load_tokens
  from mxjax.layers.quantized_linear import QuantizedLinear
  from mxjax.models.loading import embedded
  from mxjax.numerics.realization.activation_quantizers import Nearest
  from mxjax.storage import export
  from mxjax.storage.export import gguf

  model, params = mxjax.from_pretrained()
  name = jax.tree_util.keystr
  params = jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      QuantizedLinear(mxjax.encode(leaf), None, Nearest())
      if "_proj']['weight" in name(path)
      else leaf
    ),
    params,
  )
  base = export.Companions(model=embedded.gguf_path())
  export.write_gguf(work / "mxfp4", export.Source(params, model.config), base)
  reader = GGUFReader(work / "mxfp4" / gguf.FILE)
  decoded = [
    (t.name, np.ascontiguousarray(dequantize(t.data, t.tensor_type), np.float32), None)
    for t in reader.tensors
  ]
  (work / "float32").mkdir()
  gguf._write(work / "float32" / gguf.FILE, reader, decoded)
  ids = load_tokens(None, mxjax.load_tokenizer(), count=1, length=TOKENS, split="test")
  (work / "ids.json").write_text(json.dumps(ids[0].tolist()))
  for form, tree in (("strict", params), ("weights", gguf.runtime_params(params))):
    np.save(work / f"{form}.npy", np.float32(model.apply({"params": tree}, ids)[0]))


def theirs(work):
  from cyllama.llama import llama_cpp

  class Model(llama_cpp.LlamaModel):
    # Its own `get_logits_ith` reads this, and the class lacks it.
    n_vocab = VOCABULARY

  ids = json.loads((work / "ids.json").read_text())
  for form in ("mxfp4", "float32"):
    settings = llama_cpp.LlamaModelParams()
    settings.n_gpu_layers = 0
    model = Model(str(work / form / "model.gguf"), settings)
    sizes = llama_cpp.LlamaContextParams()
    sizes.n_ctx = sizes.n_batch = sizes.n_ubatch = 2 * TOKENS
    context = llama_cpp.LlamaContext(model, sizes)
    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    batch.set_batch(ids, n_past=0, logits_all=True)
    context.decode(batch)
    rows = [context.get_logits_ith(i) for i in range(len(ids))]
    np.save(work / f"llama-{form}.npy", np.asarray(rows, np.float32))


def compare(work):
  def read(name):
    logits = np.load(work / f"{name}.npy").astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

  pairs = {
    "weights decoded to float32": ("weights", "llama-float32"),
    "MXFP4, as exported": ("weights", "llama-mxfp4"),
    "MXFP4, beside our strict W4A4": ("strict", "llama-mxfp4"),
  }
  lines = [
    "| llama.cpp reads | KL, nats a token | same likeliest token |",
    "|---|---|---|",
  ]
  for name, (first, second) in pairs.items():
    exact, other = read(first), read(second)
    kl = (np.exp(exact) * (exact - other)).sum(-1).mean()
    same = (exact.argmax(-1) == other.argmax(-1)).sum()
    lines.append(f"| {name} | {kl:.1e} | {same} of {len(exact)} |")
  RESULT.write_text("\n".join(lines) + "\n")
  print("\n".join(lines))


if __name__ == "__main__":
  if len(sys.argv) != 3:
    sys.exit(__doc__)
  stage, place = sys.argv[1:]
  pathlib.Path(place).mkdir(parents=True, exist_ok=True)
  {"ours": ours, "theirs": theirs, "compare": compare}[stage](pathlib.Path(place))
