"""What benchmarks share: options, inputs, how a result was made, and how it is kept."""

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
PLACES = ("--data", "--german", "--out", "--compiled", "--consumer")
"""Options that say where something lies, which no result tells."""
KEPT_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
"""The variable by which JAX keeps compiled programs for other processes."""
WIKITEXT = "wikitext2/wiki.test.raw"
C4 = "c4/c4_en_train_first1000.jsonl"
CALIBRATION_DOCUMENTS = 600
"""Of the thousand of C4; the others are unseen text."""


def own_result():
  """Where the result of this script lies in the repository."""
  return RESULTS / f"{pathlib.Path(sys.argv[0]).stem}.json"


def parser(doc, *, data=False, out=True, tiny=False):
  """A parser with `--out`, by default the script's own result, `--data`, `--tiny`."""
  made = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  if out:
    made.add_argument(
      "--out", type=pathlib.Path, default=own_result(), help="the result file"
    )
  if data:
    folder = pathlib.Path("../shared/data")
    made.add_argument("--data", type=pathlib.Path, default=folder, help="of texts, ids")
  if tiny:
    made.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
  return made


def command():
  """The command line of this script, without the options that name places."""
  words, skip = ["python", f"benchmarks/{pathlib.Path(sys.argv[0]).name}"], False
  for word in sys.argv[1:]:
    name = word.split("=")[0]
    if skip or name in PLACES:
      skip = not skip and "=" not in word
      continue
    words.append(pathlib.Path(word).name if word.startswith("/") else word)
  return shlex.join(words)


def cpu():
  """The processor's name."""
  file = pathlib.Path("/proc/cpuinfo")
  lines = file.read_text().splitlines() if file.is_file() else []
  names = (line.split(":")[1].strip() for line in lines if "model name" in line)
  return next(names, platform.machine())


def gpu():
  """What the driver says of the card: name, driver, clocks, power; None without one."""
  query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
  words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
  try:
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
  except (OSError, subprocess.SubprocessError):
    return None
  return told.stdout.strip()


def stamp(*packages):
  """Entries for the top of a result file; versions are of `packages`, too."""
  card = gpu()
  return {
    "command": command(),
    "machine": {
      "cpu": cpu(),
      "cores": os.cpu_count(),
      "load_at_start": os.getloadavg()[0],
      "python": platform.python_version(),
      **({"gpu": card} if card else {}),
    },
    "versions": {
      name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)
    },
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
  }


def markdown(head, lines):
  """A Markdown table of text cells."""
  rows = [head, ["---"] * len(head), *lines]
  return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def write(path, result, text=""):
  """Writes the result, and beside it the Markdown that the documents include."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=1) + "\n")
  if text:
    path.with_suffix(".md").write_text(text)
    print(text, flush=True)


def finish(options, result, text):
  """Writes as `write`; a rehearsal leaves no result but where `--out` names one."""
  if options.tiny and options.out == own_result():
    print(text, flush=True)
  else:
    write(options.out, result, text)


class Entries:
  """What a part measures, written after each entry: a stop costs only the rest."""

  def __init__(self, file):
    self.file, self.entries, self.start = file, {}, time.perf_counter()

  def put(self, name, value):
    self.entries[name] = value
    self.entries["seconds"] = round(time.perf_counter() - self.start, 1)
    self.file.write_text(json.dumps(self.entries))
    print(f"  {name}: {json.dumps(value)[:400]}", flush=True)


def in_processes(limits, words=()):
  """Runs this script once for each part, with `--only PART --out FILE` and `words`.

  `limits` are the seconds after which a part is stopped. Returns what each part wrote
  by its name, and what went wrong. A part finds no program that others compiled.
  """
  parts, failures = {}, {}
  environment = {k: v for k, v in os.environ.items() if k != KEPT_PROGRAMS}
  for part, limit in limits.items():
    print(part, flush=True)
    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / "part.json"
      command = [sys.executable, sys.argv[0], "--only", part, "--out", str(file)]
      # Its own group: what it started ends with it.
      process = subprocess.Popen(
        [*command, *words], env=environment, start_new_session=True
      )
      try:
        if code := process.wait(limit):
          failures[part] = f"ended with {code}"
      except subprocess.TimeoutExpired:
        failures[part] = f"stopped after {limit} s"
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()
      parts[part] = json.loads(file.read_text()) if file.is_file() else {}
  return parts, failures


def clock(call, seconds=0.5, least=3, most=30):
  """Median and least milliseconds of calls that wait for their results."""
  call()
  taken, start = [], time.perf_counter()
  while len(taken) < least or (
    time.perf_counter() - start < seconds and len(taken) < most
  ):
    begin = time.perf_counter()
    call()
    taken.append(1e3 * (time.perf_counter() - begin))
  ms = statistics.median(taken)
  return {"ms": ms, "least_ms": min(taken), "runs": len(taken)}


def cuda_graph(torch, run):
  """Captures what torch does in `run` as a CUDA graph; returns it and `run`'s result.

  Three runs on a side stream come first, as torch asks for.
  """
  side = torch.cuda.Stream()
  side.wait_stream(torch.cuda.current_stream())
  with torch.cuda.stream(side):
    for _ in range(3):
      run()
  torch.cuda.current_stream().wait_stream(side)
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    result = run()
  return graph, result


def read(path, otherwise):
  """The result that is there, or what a first run begins with."""
  return json.loads(path.read_text()) if path.is_file() else otherwise


def smollm2_ids(data):
  """Fixed SmolLM2 token ids: of C4 [16, 2048] and of WikiText-2 [8, 2048]."""
  import numpy as np

  files = ("c4/smollm2_calib_16x2048.npy", "wikitext2/smollm2_test_8x2048.npy")
  return [np.load(data / file).astype(np.int32) for file in files]


def c4_text(data):
  """The documents of C4 as one text."""
  lines = (data / C4).read_text().splitlines()
  return "\n\n".join(json.loads(line)["text"] for line in lines)


def split_c4(data, folder):
  """Writes the C4 documents as two files, to calibrate on and to measure on."""
  lines = (data / C4).read_text().splitlines(keepends=True)
  folder.mkdir(parents=True, exist_ok=True)
  files = [folder / f"c4_{name}.jsonl" for name in ("calibration", "unseen")]
  files[0].write_text("".join(lines[:CALIBRATION_DOCUMENTS]))
  files[1].write_text("".join(lines[CALIBRATION_DOCUMENTS:]))
  return files


def in_turns(calls, rounds):
  """Wall and CPU seconds of each call by round.

  Calls take turns in one process, so that a busy moment of the machine hits all.
  """
  seconds = collections.defaultdict(list), collections.defaultdict(list)
  for _ in range(rounds):
    for name, call in calls.items():
      starts = time.perf_counter(), time.process_time()
      call()
      for spent, start, clock in zip(
        seconds, starts, (time.perf_counter, time.process_time), strict=True
      ):
        spent[name].append(clock() - start)
  return tuple(map(dict, seconds))


def medians(seconds):
  """Median by name."""
  return {name: statistics.median(values) for name, values in seconds.items()}
