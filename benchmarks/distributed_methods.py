"""Two processes quantize what one does: are the results the same, bit for bit?

  python benchmarks/distributed_methods.py [--methods gptq,hires]

Runs `mxjax quantize` on the smallest trained model in one process and then, for each
mesh, in two local processes joined by jax.distributed, and compares the SHA-256 of
every array of the checkpoints, the records of all layers and the perplexities. Writes
benchmarks/results/distributed_methods.json.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import provenance

HERE = pathlib.Path(__file__).parent
RESULT = HERE / "results" / "distributed_methods.json"
MODEL = HERE.parent / "models" / "trained" / "llama"
MESHES = ("data=2,model=1", "data=1,model=2")


def words(options, method, folder, out):
  tokens = str(folder / "tokens.npy")
  return [
    *("quantize", str(MODEL), "--method", method, "--out", str(out)),
    *("--calib", tokens, "--data", tokens, "--dtype", "float32"),
    *("--sequences", str(options.sequences), "--length", str(options.length)),
    *("--windows", "2", "--window-length", str(options.length)),
  ]


def start(arguments):
  command = [sys.executable, "-m", "mxjax.evaluation.cli.parser", *arguments]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def finish(processes):
  codes = [process.wait() for process in processes]
  assert not any(codes), codes


def alone(arguments):
  finish([start(arguments)])


def together(arguments, mesh):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  more = ["--distributed", "--mesh", mesh, "--coordinator", f"127.0.0.1:{port}"]
  more += ["--processes", "2", "--process"]
  finish([start([*arguments, *more, str(process)]) for process in range(2)])


def found(out):
  """Digests of all arrays, and what the run measured."""
  manifest = json.loads((out / "checkpoint" / "mxjax.json").read_text())
  row = json.loads((out / "result.json").read_text())[0]
  return manifest["arrays"], row


def compare(one, other):
  (arrays, row), (others, again) = one, other
  differing = sorted(
    path
    for path in arrays.keys() | others.keys()
    if arrays.get(path) != others.get(path)
  )
  return {
    "mesh": again["record"]["mesh"],
    "arrays": len(arrays),
    "arrays_differing": differing,
    "same_layer_records": row["record"]["layers"] == again["record"]["layers"],
    "perplexity_alone": row["perplexity"],
    "perplexity": again["perplexity"],
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--methods", default="gptq,hires")
  parser.add_argument("--sequences", type=int, default=4)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  result = provenance.stamp(hidden=("--out",)) | {"rows": []}
  rng = np.random.default_rng(0)
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    # Runs of one model: what one has compiled the next need not.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    shape = options.sequences, options.length
    np.save(folder / "tokens.npy", rng.integers(0, 2048, shape).astype(np.int32))
    for method in options.methods.split(","):
      outs = [folder / f"{method}-{number}" for number in range(1 + len(MESHES))]
      begun = time.perf_counter()
      alone(words(options, method, folder, outs[0]))
      seconds = [time.perf_counter() - begun]
      for mesh, out in zip(MESHES, outs[1:], strict=True):
        begun = time.perf_counter()
        together(words(options, method, folder, out), mesh)
        seconds.append(time.perf_counter() - begun)
        row = {"method": method, **compare(found(outs[0]), found(out))}
        row |= {"seconds_alone": seconds[0], "seconds": seconds[-1]}
        result["rows"].append(row)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
  main()
