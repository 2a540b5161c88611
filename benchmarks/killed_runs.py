"""Kills real `mxjax quantize` processes, resumes them, and compares the results.

    python benchmarks/killed_runs.py [--random 20]

A small model is made and quantized once undisturbed. Then, for every named stage of
every layer and for random moments, a child is killed by SIGKILL there and another goes
on with `--resume`, which is killed too at a random moment in a third of the cases. The
final checkpoints and the layer files of the run folders must be those of the
undisturbed run byte for byte, but for two files that hold the time; the resumed
children must have worked on no layer that was on disk. Exits with 1 where anything
differs.
"""

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

import common
import jax
import numpy as np
import tokenizers

from mxjax.models import CausalLM, ModelConfig
from mxjax.models.families import to_hf_config
from mxjax.models.loading import weights

CONFIG = ModelConfig(
  vocab_size=64,
  hidden_size=64,
  intermediate_size=128,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  norm_eps=1e-5,
  rope_theta=1e4,
  max_positions=64,
  tie_embeddings=True,
)
STAGES = ("calibration", "quantization", "q_proj", "down_proj")
RECOVERY = ("attention recovery", "mlp recovery")
TIMED = ("arrays/_CHECKPOINT_METADATA", "arrays/commit_success.txt")
"""Files in which Orbax writes down the time of day."""


def make_model(folder):
  """A folder as transformers saves them, of random weights, with a tokenizer."""
  folder.mkdir()
  model = CausalLM(CONFIG)
  params = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
  weights.save_folder(folder, to_hf_config(CONFIG), params)
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=64, show_progress=False)
  backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
  backend.save(str(folder / "tokenizer.json"))
  ids = np.random.default_rng(0).integers(0, 64, (4, 32)).astype(np.int32)
  np.save(folder / "ids.npy", ids)


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


def killed_and_resumed(runner, out, point, again, layers):
  """Kills a run at a point, and perhaps its resumption; how a last one ended it."""
  layer, where = point
  kill = lambda: runner.kill_after(out, where)
  if layer is not None:
    kill = lambda: runner.kill_at_stage(out, layer, where)
  kills = [kill()]
  if again:
    kills.append(runner.kill_after(out, again, "--resume"))
  before = finished_layers(out)
  worked, spent = runner.finish(out, "--resume")
  return {
    "layer": layer,
    "point": where,
    "kills": sum(kills),
    "finished_before": before,
    "layers_worked_after": worked,
    "redid_nothing": worked == layers[before:],
    "seconds": spent,
  }


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--random", type=int, default=20, metavar="N")
  parser.add_argument("--method", default="hires")
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  made, rng, rows = common.stamp(), random.Random(options.seed), []
  with tempfile.TemporaryDirectory() as scratch:
    work = pathlib.Path(scratch)
    make_model(work / "model")
    runner = Runner(work, options.method)
    runner.finish(work / "warm")
    layers, seconds = runner.finish(work / "undisturbed")
    expected = content(work / "undisturbed")
    stages = STAGES + RECOVERY * (options.method == "hires")
    points = [(layer, stage) for layer in layers for stage in stages]
    points += [(None, rng.uniform(0, seconds)) for _ in range(options.random)]
    for number, point in enumerate(points):
      out = work / f"run-{number}"
      again = rng.uniform(0, seconds) if rng.random() < 1 / 3 else 0
      row = killed_and_resumed(runner, out, point, again, layers)
      rows.append(row | {"same": content(out) == expected})
      print(json.dumps(rows[-1]), flush=True)
  total = lambda key: sum(row[key] for row in rows)
  result = {
    **made,
    "files_compared": len(expected),
    "timed_files": TIMED,
    "method": options.method,
    "undisturbed_seconds": seconds,
    "points": len(rows),
    **{key: total(key) for key in ("kills", "same", "redid_nothing")},
    "rows": rows,
  }
  common.write(options.out, result)
  return int(not len(rows) == total("same") == total("redid_nothing"))


if __name__ == "__main__":
  sys.exit(main())
