"""The model card of an export: `README.md` with the front matter that hubs read."""

from collections.abc import Mapping
from typing import Any

LOADING = {
  "compressed-tensors": """With `transformers` and the library `compressed-tensors`:

```python
model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
```

The library decodes weights to bfloat16 whatever `dtype=` says, so that
`dtype=torch.float32` alone ends in an error. In float32, with the same weights:

```python
scheme = transformers.CompressedTensorsConfig(dequantize=True)
model = transformers.AutoModelForCausalLM.from_pretrained(
  FOLDER, quantization_config=scheme
).float()
```

Activations are rounded by the runtime's own rule, or not at all, which a version of
transformers may decide by `dequantize`. On a CPU, vLLM 0.32.0 has no kernel for these
linears; its kernels for GPUs have not been tried.""",
  "dequant": """Any Hugging Face loader reads it as a float model:

```python
model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
```""",
  "mxjax-transformers": """With `transformers` and the code of this folder, slowly:

```python
model = transformers.AutoModelForCausalLM.from_pretrained(
  FOLDER, trust_remote_code=True
)
```""",
  "mxjax-safetensors": """With `mxjax`:

```python
params, state = mxjax.storage.export.read_state(FOLDER)
```""",
  "gguf": """With llama.cpp, of a version that has the type MXFP4:

```
llama-cli -m model.gguf
```""",
}
"""How a folder of each format is loaded."""
LIBRARIES = {"mxjax-safetensors": "mxjax", "gguf": "gguf"}
"""The library of a format, where it is not transformers."""


def _written(value: Any) -> str:
  """Writes a value in a cell of a Markdown table."""
  if isinstance(value, Mapping):
    value = ", ".join(f"{key} {_written(one)}" for key, one in value.items())
  elif isinstance(value, list | tuple):
    value = ", ".join(map(_written, value)) or "none"
  # A bar or a line break would end the cell.
  return " ".join(str(value).replace("|", "\\|").split())


def perplexities(measured: Mapping[str, Any] | None) -> dict[str, str]:
  """Returns what an export measured, by what was measured, and on which tokens.

  `measured` is `evaluation` of `mxjax_export.json`; None gives nothing.
  """
  if not measured:
    return {}
  shape = " x ".join(map(str, measured["windows"]))
  return {
    f"perplexity, {name}": f"{value:.4f} on {measured['data']}, {shape} tokens"
    for name, value in measured["perplexity"].items()
  }


def _when_built(measured: Mapping[str, Any]) -> dict[str, str]:
  """Returns what a build measured, by what was measured: `built` of a manifest."""
  rows = {f"when built, {name}": text for name, text in perplexities(measured).items()}
  if found := measured["agreement"]:
    rows["when built, KL from the float model"] = f"{found['kl_mean']:.4f} nats a token"
    rows["when built, most likely token changed"] = f"{found['flips']:.1%} of tokens"
  return rows


def model_card(form: str, manifest: Mapping[str, Any]) -> str:
  """Returns the card of a folder whose manifest is given, without its files.

  It says what was measured; of a model that was not measured it says so.
  """
  facts = manifest["source"]
  program, calibration = facts.get("program") or {}, facts.get("calibration") or {}
  method = program.get("name", "unknown")
  contract = facts.get("contract") or {}
  rounds = contract.get("activations", "mxfp4") == "mxfp4"
  # The tag w4a4 stands only where loading the folder computes the strict model.
  strict = rounds and manifest["activations"] == "as in the checkpoint"
  tags = ["mxfp4", "mxjax", "quantized", *(["w4a4"] if strict else [])]
  front = [
    "---",
    f"library_name: {LIBRARIES.get(form, 'transformers')}",
    "pipeline_tag: text-generation",
    f"tags: [{', '.join(tags)}]",
    "---",
  ]
  rows = {
    "float model": calibration.get("model", "unknown"),
    "method": method,
    "options": program.get("options", "none"),
    "format": form,
    "weights": "E2M1 codes, one E8M0 scale for 32 values",
    "activations": manifest["activations"],
    "calibration": {k: v for k, v in calibration.items() if k != "model"} or "unknown",
    "contract": facts.get("contract_hash", "unknown"),
    "checkpoint": facts.get("digest", "unknown"),
    "left out": manifest.get("dropped", []),
  }
  if measured := manifest.get("built"):
    rows |= _when_built(measured)
  if measured := manifest.get("evaluation"):
    rows |= perplexities(measured)
  else:
    rows["perplexity"] = "not measured when it was exported"
  table = [f"| {key} | {_written(value)} |" for key, value in rows.items()]
  return "\n".join(
    [
      *front,
      "",
      f"# {_written(rows['float model'])}, {_written(method)}, MXFP4",
      "",
      "Quantized by mxjax. The license is that of the float model.",
      "",
      "| what | value |",
      "|---|---|",
      *table,
      "",
      "## How to load it",
      "",
      LOADING[form],
      "",
      "`mxjax_export.json` has these facts for programs, and the SHA-256 of each file.",
      "",
    ]
  )
