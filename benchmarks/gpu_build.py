"""How long does a build take that a user starts from the command line?

Every build is `mxjax quantize` in a process of its own, from the start of the
interpreter to the written report: reading, digests, checkpoint and measurements are in
its seconds. Builds of one method share a folder of compiled programs that is empty
before the first: that one is cold, the next ones find the programs kept.

- `small`: `models/trained/qwen3`, about a million parameters in 4 layers, on 32 x 512
  tokens of C4 (`--data`), measured on 16 windows with agreement and operator error.
- `8B`: random weights of Qwen3-8B's shapes with query and key norms, a head and an
  embedding of 151,936 rows, in a few layers, on 128 x 2,048 random ids, measured on 2
  windows. The whole model's minutes are those of the cold build, and for each layer
  that it lacks the difference of two builds with kept programs, a layer.

Of a build's seconds: those of the stages that its record tells (calibration, weights,
recovery, written hidden states, sanity gate), of measuring the result, and the rest:
interpreter, reading, digests, checkpoint. Compilation is in all of them; its seconds
are the sum of what JAX tells, also where programs are compiled side by side.

  python benchmarks/gpu_build.py --only "small hires" "small hires-next" "8B hires"
  python benchmarks/gpu_build.py --tiny        # rehearses on a CPU
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import common

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = ROOT / "models" / "trained" / "qwen3"
WHOLE = 36
"""Layers of Qwen3-8B."""
CASES = {
  "small hires": ("hires", {"cold": 150, "kept": 60}),
  "small hires-next": ("hires-next", {"cold": 240, "kept": 90}),
  "8B hires": ("hires", {"cold, 2": 260, "kept, 2": 90, "kept, 4": 120}),
  "8B hires-next": ("hires-next", {"cold, 2": 420, "kept, 2": 200}),
}
"""Method, and the seconds after which each build is stopped; numbers are layers."""


def one_build(words, out):
  """Runs the command line in this process, and writes where its time went."""
  begun = time.time()
  import jax

  from mxjax.cli.main import main as mxjax_main

  told = {"compile_s": 0.0, "programs": 0, "of_kept_s": 0.0}

  def listen(name, seconds, **_):
    if name.endswith("backend_compile_duration"):
      told["compile_s"] += seconds
      told["programs"] += 1
    elif name.endswith("cache_retrieval_time_sec"):
      told["of_kept_s"] += seconds

  jax.monitoring.register_event_duration_secs_listener(listen)
  imported = time.time()
  code = mxjax_main(words)
  told |= {"import_s": imported - begun, "command_s": time.time() - imported}
  stats = jax.devices()[0].memory_stats() or {}
  told |= {
    "device": jax.devices()[0].device_kind,
    "peak_GB": stats.get("peak_bytes_in_use", 0) / 1e9,
  }
  out.write_text(json.dumps(told))
  return code


def write_model(folder, layers, is_tiny):
  """Writes a float model of random weights as Hugging Face does, and its tokenizer."""
  import gpu_models
  import tokenizers

  from mxjax.models.families import to_hf_config
  from mxjax.models.loading import weights

  shape = gpu_models.TINY if is_tiny else gpu_models.QWEN3_8B
  model, params = gpu_models.random_model(shape, "BF16", layers)
  folder.mkdir()
  weights.save_folder(folder, to_hf_config(model.config), params)
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False)
  backend.train_from_iterator(["a model of random weights reads nothing"], trainer)
  backend.save(str(folder / "tokenizer.json"))


def stages(result):
  """Seconds by stage of a build's `result.json`; layers' stages are summed."""
  record = result[0] if isinstance(result, list) else result
  found = {}

  def walk(node, path):
    if isinstance(node, dict):
      for name, value in node.items():
        walk(value, (*path, name))
    elif isinstance(node, int | float) and "seconds" in "/".join(path):
      found["/".join(path)] = round(float(node), 2)

  walk(record, ())
  return found


def agreed(result):
  """Mean KL to the float model, and operator error, of a build's `result.json`."""
  record = result[0] if isinstance(result, list) else result
  return {
    "kl_mean": (record.get("agreement") or {}).get("kl_mean"),
    "operator_error": record.get("operator_error"),
  }


def timeline(log, start):
  """When the command said what it does next: pairs of seconds since `start` and words.

  Layers after the first are told as one, because they call what it has compiled.
  """
  said, last = [], None
  for line in log.read_text().splitlines():
    try:
      event = json.loads(line)
    except ValueError:
      continue
    words = event.get("text") or event.get("stage") or event.get("event")
    if event.get("layer") and words not in ("sanity gate",) and "window" not in words:
      words = "later layers"
    words = f"{event.get('method', '')} {words.split(', window')[0]}".strip()
    if words != last:
      said.append([round(event["time"] - start, 1), words[:120]])
    last = words
  return said


def run_build(words, folder, environment, limit):
  """Runs a build to its end or limit; returns its entry."""
  told, out = folder / "told.json", folder / "out"
  command = [sys.executable, __file__, "--build", str(told), "--", *words]
  start = time.time()
  with (folder / "log").open("w") as log:
    process = subprocess.Popen(
      [*command, "--out", str(out)],
      env=environment,
      stdout=log,
      stderr=log,
      start_new_session=True,
    )
    try:
      code = process.wait(limit)
    except subprocess.TimeoutExpired:
      code = None
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  entry = {"seconds": round(time.time() - start, 2), "status": "ok"}
  entry["timeline"] = timeline(folder / "log", start)
  if code != 0:
    last = (folder / "log").read_text().strip().splitlines()[-12:]
    why = f"stopped after {limit} s" if code is None else f"ended with {code}"
    entry |= {"status": why, "log": last}
  if told.is_file():
    entry |= json.loads(told.read_text())
  if (out / "result.json").is_file():
    result = json.loads((out / "result.json").read_text())
    entry |= {"stages": stages(result)} | agreed(result)
  return entry


def case(name, options, scratch, put):
  """Runs the builds of a case in turn; each entry is kept as soon as it is there."""
  method, limits = CASES[name]
  place = scratch / name.replace(" ", "-")
  place.mkdir()
  cache = place / "cache"
  # Packages that are not installed may be found there.
  given = os.environ.get("PYTHONPATH", "")
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), given])),
    "XDG_CACHE_HOME": str(cache),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  environment.pop("JAX_COMPILATION_CACHE_DIR", None)
  tiny = options.tiny
  for build, limit in limits.items():
    folder = place / build.replace(", ", "-")
    folder.mkdir()
    words = ["quantize", "--method", method, "--compiled", str(cache / "programs")]
    words += ["--log", "json"]
    if name.startswith("small"):
      calibration, unseen = common.split_c4(options.data, folder)
      sequences, length, windows = (2, 32, 2) if tiny else (32, 512, 16)
      words += [str(SMALL), "--calib", str(calibration), "--data", str(unseen)]
      words += ["--agreement", "--operator-error", "--dtype", "bfloat16"]
    else:
      import numpy as np

      layers = int(build.split(", ")[1])
      model = scratch / f"model-{layers}"
      if not model.is_dir():
        write = [sys.executable, __file__, "--model", str(model), "--layers"]
        write += [str(layers), *(["--tiny"] if tiny else [])]
        subprocess.run(write, check=True, env=environment)
      sequences, length, windows = (2, 32, 1) if tiny else (128, 2048, 2)
      rng, files = np.random.default_rng(0), (folder / "c.npy", folder / "t.npy")
      for file, count in zip(files, (sequences, windows), strict=True):
        np.save(file, rng.integers(0, 256, (count, length)).astype(np.int32))
      words += [str(model), "--calib", str(files[0]), "--data", str(files[1])]
      words.append("--no-check")  # Random weights predict nothing.
    words += ["--sequences", str(sequences), "--length", str(length)]
    words += ["--windows", str(windows), "--window-length", str(length)]
    limit = 900 if tiny else limit
    entry = run_build(words, folder, environment, limit)
    put(f"{name}, {build}", entry | {"sequences": sequences, "length": length})
    if entry["status"] != "ok":
      return


def whole_minutes(entries, name):
  """Minutes of a cold build of all layers; None if a build is missing."""
  found = [
    entries.get(f"{name}, {build}", {}) for build in ("cold, 2", "kept, 2", "kept, 4")
  ]
  if any(entry.get("status") != "ok" for entry in found):
    return None
  cold, two, four = (entry["seconds"] for entry in found)
  return (cold + (WHOLE - 2) * (four - two) / 2) / 60


def table(entries):
  """Rows of the table: seconds, those of compilation, of stages, of the rest; KL."""
  rows = []
  for name, entry in entries.items():
    if not isinstance(entry, dict):
      continue
    inside = entry.get("stages", {})
    staged = sum(s for key, s in inside.items() if "clock/seconds/" in key)
    measured = inside.get("evaluation_seconds", 0.0)
    shown = [entry["seconds"], entry.get("compile_s")]
    if staged:
      shown += [staged, measured, entry["seconds"] - staged - measured]
    cells = [f"{value:.1f}" if value is not None else "-" for value in shown]
    cells += ["-"] * (5 - len(cells))
    programs = str(entry.get("programs", "-"))
    kl = entry.get("kl_mean")
    kl = "-" if kl is None else f"{kl:.4f}"
    rows.append([name, entry["status"], *cells, programs, kl])
  return rows


def main():
  """Runs the cases that are asked for, one build after the other."""
  parser = common.parser(__doc__, data=True, tiny=True)
  parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
  # What this script calls itself with.
  for hidden in ("--build", "--model"):
    parser.add_argument(hidden, type=pathlib.Path, help=argparse.SUPPRESS)
  parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
  own, words = sys.argv[1:], []
  if "--" in own:
    at = own.index("--")
    own, words = own[:at], own[at + 1 :]
  options = parser.parse_args(own)
  if options.build:
    sys.exit(one_build(words, options.build))
  if options.model:
    write_model(options.model, options.layers, options.tiny)
    return
  result = common.stamp() | {"builds": {}}

  def put(name, entry):
    print(f"{name}: {entry['status']}, {entry['seconds']} s", flush=True)
    result["builds"][name] = entry
    for each in CASES:
      if (minutes := whole_minutes(result["builds"], each)) is not None:
        result["whole_model_minutes"] = {each: minutes}
    head = ["build", "status", "s", "compilation, s", "stages, s", "measured, s"]
    text = common.markdown(
      [*head, "rest, s", "programs", "KL"], table(result["builds"])
    )
    common.finish(options, result, text)

  with tempfile.TemporaryDirectory(dir=os.environ.get("SCRATCH")) as scratch:
    for name in options.only:
      case(name, options, pathlib.Path(scratch), put)
  statuses = [entry["status"] for entry in result["builds"].values()]
  sys.exit(any(status != "ok" for status in statuses))


if __name__ == "__main__":
  main()
