"""Kernels and the packed runtime on one GPU: correctness first, then speed.

  python benchmarks/gpu.py --part 1 --out DIR     then parts 2 and 3
  python benchmarks/gpu.py --smoke --out DIR      tiny shapes, interpreted, any CPU

It needs an unpacked checkout and the packages that mxjax imports, installed or not
itself. Every section is a process of its own with a time limit, so one that raises,
hangs or crashes costs itself only; a part takes nine minutes at most. After every
section `DIR/gpu_part1.json` is written again, with what failed and why; the output of
all sections is in `DIR/gpu_part1.log`. A goal counts only if the kernels that it uses
passed their check; parts 2 and 3 read the checks of `gpu_part1.json`.
"""

import argparse
import concurrent.futures
import datetime
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = (
  *("encode", "one code", "few codes", "matmul", "linears of one input", "decode"),
  *("float8 product", "GPTQ", "recovery", "attention", "prefill attention", "layer"),
  "Mosaic forms",
)
WHOLE = (
  *("prefill BF16, fastest attention", "prefill BF16", "prefill HiRes"),
  *("prefill HiRes, float8 products", "decode BF16", "decode HiRes"),
  "decode HiRes, int8 head",
)
"""Whole models, the baselines first."""
TILES = (
  *("tiles of encode and decode", "tiles of refinement", "tiles of products"),
  *("tiles of integer products", "Mosaic forms"),
)
PART_SECONDS = 540
TOGETHER, AT_ONCE = ("check", "tiles"), 7
"""Sections that run at once by the first word of their names: checks, which time
nothing, and tiles, whose measurements wait for each other."""
PARTS = {
  1: {
    "device": 60,
    "ceilings": 60,
    **{f"check {name}": 180 for name in KERNELS},
    "memory-bound kernels": 150,
    "packed products": 150,
    "attention of a prefill": 90,
    **dict.fromkeys(TILES, 90),
  },
  2: {
    "device": 60,
    "ceilings": 60,
    "torch's baselines": 90,
    **dict.fromkeys(WHOLE, 120),
  },
  3: {
    "device": 60,
    "ceilings": 60,
    "build 8B": 360,
    "trained model": 270,
    "prefill 32B": 120,
  },
}
"""Sections of each part in order, with their largest seconds."""
FORWARD = (
  *("one code", "matmul", "linears of one input", "recovery", "layer"),
  "prefill attention",
)
GOALS = {
  "encode, share of copy bandwidth": (0.80, "at least", ("encode",)),
  "HiRes forward, times BF16": (1.10, "at most", FORWARD),
  "HiRes forward, float8 products, times BF16": (
    *(1.00, "at most", (*FORWARD, "decode", "float8 product")),
  ),
  "HiRes decode, times BF16 tokens a second": (
    *(2.5, "at least", (*FORWARD, "attention")),
  ),
  "8B build, minutes": (5.0, "at most", ("one code", "GPTQ")),
}
"""Bound, its sense, and the kernels that it rests on."""
PREDICTIONS = json.loads((HERE / "results" / "gpu_predictions.json").read_text())
"""Ranges by goal, and by section and name: written before any GPU ran this."""


def execute(name, limit, command, environment):
  """Runs a section to its end or limit; returns its entry and its output."""
  start = time.monotonic()
  with tempfile.TemporaryFile() as output:
    process = subprocess.Popen(
      command,
      stdout=output,
      stderr=subprocess.STDOUT,
      env=environment,
      start_new_session=True,
    )
    try:
      code = process.wait(limit)
    except subprocess.TimeoutExpired:
      code = None
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    output.seek(0)
    text = output.read().decode(errors="replace")
  entry = {"seconds": round(time.monotonic() - start, 1), "status": "ok"}
  if code is None:
    entry["status"] = f"stopped after {limit:.0f} s"
  elif code < 0:
    entry["status"] = f"killed by {signal.Signals(-code).name}"
  elif code:
    last = text.strip().splitlines() or [""]
    entry["status"] = f"exit code {code}: {last[-1]}"
  return entry, f"\n== {name}: {entry['status']}, {entry['seconds']} s\n{text}"


class Part:
  """One part of the run: its sections, their results, and the goals."""

  def __init__(self, number, options):
    self.number, self.options = number, options
    self.end = time.monotonic() + options.budget
    self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="mxjax-gpu-"))
    self.results, self.log = {}, ""

  def run(self):
    sections = dict(PARTS[self.number])
    if self.options.only:
      sections = {k: v for k, v in sections.items() if k in self.options.only}
    alone = lambda name: name if name.split()[0] not in TOGETHER else name.split()[0]
    for _, batch in itertools.groupby(sections, alone):
      with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for name, entry, text in pool.map(
          lambda name: self.section(name, sections[name]), batch
        ):
          self.results[name] = entry
          self.log += text
          print(text, flush=True)
          self.save()
    return self.summary()

  def section(self, name, limit):
    left = self.end - time.monotonic()
    if left < 5:
      return name, {"status": "left out: no time"}, f"\n== {name}: left out, no time\n"
    file = self.scratch / f"{name}.json"
    command = [sys.executable, str(HERE / "gpu_sections.py"), name, "--out", str(file)]
    command += ["--earlier", str(self.scratch)]
    command += ["--compiled", self.options.compiled]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if self.options.smoke:
      command.append("--smoke")
      environment["JAX_PLATFORMS"] = "cpu"
      limit = left  # A busy CPU says nothing of how long a GPU takes.
    entry, text = execute(name, min(limit, left), command, environment)
    if entry["status"] == "ok":
      entry |= json.loads(file.read_text())
    if predicted := PREDICTIONS["predicted"].get(name):
      entry["predicted"] = predicted
    return name, entry, text

  def checked(self):
    """Whether each kernel passed its check, in this part or in part 1 before it."""
    known, file = self.results, self.options.out / "gpu_part1.json"
    if self.number > 1 and file.is_file():
      known = json.loads(file.read_text())["results"]
    entries = {name: known.get(f"check {name}", {}) for name in KERNELS}
    return {name: bool(entry.get("passed")) for name, entry in entries.items()}

  def goals(self):
    passed, goals = self.checked(), {}
    for entry in self.results.values():
      for name, value in entry.get("goals", {}).items():
        bound, sense, kernels = GOALS[name]
        is_met = value >= bound if sense == "at least" else value <= bound
        failed = [kernel for kernel in kernels if not passed[kernel]]
        verdict = "met" if is_met else "not met"
        if failed or not math.isfinite(value):
          verdict = f"void: {', '.join(failed) or 'no number'}"
        goals[name] = {"value": value, "goal": f"{sense} {bound}", "verdict": verdict}
        goals[name]["predicted"] = PREDICTIONS["goals"][name]
    return goals

  def document(self):
    flags = "--smoke" if self.options.smoke else f"--part {self.number}"
    return {
      "command": f"python benchmarks/gpu.py {flags}",
      "date": datetime.date.today().isoformat(),
      "goals": self.goals(),
      "results": self.results,
    }

  def save(self):
    """Writes result and log; on a full disk the result is printed instead."""
    text = json.dumps(self.document(), indent=1)
    try:
      self.options.out.mkdir(parents=True, exist_ok=True)
      name = f"gpu_part{self.number}"
      (self.options.out / f"{name}.json").write_text(text + "\n")
      (self.options.out / f"{name}.log").write_text(self.log)
    except OSError as error:
      print(
        f"gpu: cannot write {self.options.out}: {error}; the result so far:\n{text}"
      )

  def summary(self):
    """Prints goals and failures; returns whether everything ran and passed."""
    print(f"\n== part {self.number}" + (" (smoke)" if self.options.smoke else ""))
    for name, goal in self.goals().items():
      low, high = goal["predicted"]
      print(
        f"{goal['verdict']:8s} {name}: {goal['value']:.3f}, {goal['goal']}, predicted "
        f"{low} to {high}"
      )
    bad = {n: e["status"] for n, e in self.results.items() if e["status"] != "ok"}
    wrong = [n for n, e in self.results.items() if e.get("passed") is False]
    for name, status in bad.items():
      print(f"{name}: {status}")
    for name in wrong:
      print(f"{name}: differs from its reference")
    return not bad and not wrong


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--part", type=int, choices=sorted(PARTS), nargs="+")
  parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
  parser.add_argument("--smoke", action="store_true")
  parser.add_argument("--budget", type=float, default=PART_SECONDS, help="of a part, s")
  parser.add_argument("--only", nargs="+", help="these sections")
  compiled = pathlib.Path(tempfile.gettempdir()) / "mxjax-gpu-compiled"
  parser.add_argument("--compiled", default=str(compiled))
  options = parser.parse_args()
  numbers = options.part or sorted(PARTS)
  results = [Part(number, options).run() for number in numbers]
  return 0 if all(results) else 1


if __name__ == "__main__":
  sys.exit(main())
