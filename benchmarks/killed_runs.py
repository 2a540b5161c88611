"""Kills real `mxjax quantize` processes, resumes them, and compares the results.

    python benchmarks/killed_runs.py --out benchmarks/results/killed_runs.json

A small model is made and quantized once undisturbed. Then, for every named stage of
every layer and for random moments, a child is killed by SIGKILL there and another goes
on with `--resume`, which is killed too at a random moment in a third of the cases. The
final checkpoints and the layer files of the run folders must be those of the
undisturbed run byte for byte, but for two files that hold the time; the resumed
children must have worked on no layer that was on disk. Exits with 1 where anything
differs.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import provenance

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 64,
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "max_position_embeddings": 64,
  "tie_word_embeddings": True,
  "hidden_act": "silu",
}


def make_model(folder):
  """A folder as transformers saves them, of random weights, with a tokenizer."""
  import tokenizers
  from safetensors.numpy import save_file

  rng = np.random.default_rng(0)
  width, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
  tensors = {"model.embed_tokens.weight": (64, width), "model.norm.weight": (width,)}
  for index in range(CONFIG["num_hidden_layers"]):
    layer = f"model.layers.{index}"
    for name, shape in (
      ("self_attn.q_proj", (width, width)),
      ("self_attn.k_proj", (width // 2, width)),
      ("self_attn.v_proj", (width // 2, width)),
      ("self_attn.o_proj", (width, width)),
      ("mlp.gate_proj", (hidden, width)),
      ("mlp.up_proj", (hidden, width)),
      ("mlp.down_proj", (width, hidden)),
      ("input_layernorm", (width,)),
      ("post_attention_layernorm", (width,)),
    ):
      tensors[f"{layer}.{name}.weight"] = shape
  values = {
    name: (
      np.ones(shape) if len(shape) == 1 else 0.1 * rng.standard_normal(shape)
    ).astype(np.float32)
    for name, shape in tensors.items()
  }
  folder.mkdir()
  save_file(values, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(CONFIG))
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=64, show_progress=False)
  backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
  backend.save(str(folder / "tokenizer.json"))
  np.save(folder / "ids.npy", rng.integers(0, 64, (4, 32)).astype(np.int32))


class Runner:
  """Starts children on one model; compiled programs are shared through a cache."""

  def __init__(self, work, method):
    self.model, self.method = work / "model", method
    self.environment = os.environ | {
      "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

  def start(self, out, *extra):
    ids = str(self.model / "ids.npy")
    words = ["quantize", str(self.model), "--out", str(out), "--method", self.method]
    words += ["--calib", ids, "--data", ids, "--sequences", "4", "--length", "32"]
    words += ["--windows", "2", "--window-length", "32", "--log", "json", "--json"]
    words += ["--dtype", "float32"]
    return subprocess.Popen(
      [sys.executable, "-m", "mxjax.evaluation.cli.parser", *words, *extra],
      env=self.environment,
      stderr=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      text=True,
    )

  def finish(self, out, *extra):
    """Runs a child to its end; the layers it worked on, and its seconds."""
    begun = time.perf_counter()
    child = self.start(out, *extra)
    lines = child.communicate()[1].splitlines()
    if child.returncode:
      raise SystemExit(f"a child ended with {child.returncode}: {lines[-3:]}")
    events = [json.loads(line) for line in lines if line.startswith("{")]
    layers = {one["layer"] for one in events if one["event"] == "progress"}
    return sorted(layers), time.perf_counter() - begun

  def kill_at_stage(self, out, layer, stage, *extra):
    """Kills a child when it says that it has come to a stage."""
    child = self.start(out, *extra)
    for line in child.stderr:
      event = json.loads(line) if line.startswith("{") else {}
      if event.get("layer") == layer and event.get("stage") == stage:
        break
    child.send_signal(signal.SIGKILL)
    child.communicate()
    return child.returncode == -signal.SIGKILL

  def kill_after(self, out, seconds, *extra):
    """Kills a child after some seconds, wherever it is."""
    child = self.start(out, *extra)
    try:
      child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      child.send_signal(signal.SIGKILL)
      child.communicate()
    return child.returncode == -signal.SIGKILL


def finished_layers(out):
  """Layers that the journal lists; an incomplete last line does not count."""
  file = out / "run" / "journal.jsonl"
  data = file.read_bytes() if file.is_file() else b""
  lines = data.split(b"\n")[:-1]
  return sum(json.loads(line)["event"] == "layer" for line in lines)


TIMED = ("arrays/_CHECKPOINT_METADATA", "arrays/commit_success.txt")
"""Files in which Orbax writes down the time of day."""


def content(out):
  """SHA-256 of every file of the checkpoint and of every finished layer.

  Of the two timed files only the presence counts; the manifest is compared without
  their checksums and its own, which follows from them.
  """
  folder = out / "checkpoint"
  found = {
    file.relative_to(out).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
    for place in (folder, out / "run/layers")
    for file in place.rglob("*")
    if file.is_file()
  }
  manifest = json.loads((folder / "mxjax.json").read_text())
  del manifest["digest"]
  for name in TIMED:
    del manifest["files"][name]
    found[f"checkpoint/{name}"] = "present"
  return found | {"checkpoint/mxjax.json": manifest}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--random", type=int, default=20, metavar="N")
  parser.add_argument("--named", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument("--method", default="hires")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=pathlib.Path)
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--out",))
  rng = random.Random(options.seed)
  with tempfile.TemporaryDirectory() as scratch:
    work = pathlib.Path(scratch)
    make_model(work / "model")
    runner = Runner(work, options.method)
    runner.finish(work / "warm")
    layers, seconds = runner.finish(work / "undisturbed")
    expected = content(work / "undisturbed")
    print(f"{len(expected)} files to compare", flush=True)
    stages = ["calibration", "quantization", "q_proj", "down_proj"]
    if options.method == "hires":
      stages += ["attention recovery", "mlp recovery"]
    points = [(layer, stage) for layer in layers for stage in stages]
    points = points if options.named else []
    points += [(None, rng.uniform(0, seconds)) for _ in range(options.random)]
    rows = []
    for number, (layer, where) in enumerate(points):
      out = work / f"run-{number}"
      if layer is None:
        killed = runner.kill_after(out, where)
      else:
        killed = runner.kill_at_stage(out, layer, where)
      kills = [killed]
      before = finished_layers(out)
      if rng.random() < 1 / 3:
        kills.append(runner.kill_after(out, rng.uniform(0, seconds), "--resume"))
        before = finished_layers(out)
      worked, spent = runner.finish(out, "--resume")
      row = {
        "layer": layer,
        "point": where,
        "kills": sum(kills),
        "finished_before": before,
        "layers_worked_after": worked,
        "same": content(out) == expected,
        "redid_nothing": worked == layers[before:],
        "seconds": spent,
      }
      rows.append(row)
      print(json.dumps(row), flush=True)
  result = {
    **made,
    "files_compared": len(expected),
    "timed_files": TIMED,
    "method": options.method,
    "undisturbed_seconds": seconds,
    "points": len(rows),
    "kills": sum(row["kills"] for row in rows),
    "same": sum(row["same"] for row in rows),
    "redid_nothing": sum(row["redid_nothing"] for row in rows),
    "rows": rows,
  }
  if options.out:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
  print({key: value for key, value in result.items() if key != "rows"})
  return int(not all(row["same"] and row["redid_nothing"] for row in rows))


if __name__ == "__main__":
  sys.exit(main())
