"""All questions to one GPU, within seconds that are given: correctness first.

  python benchmarks/gpu.py --out DIR                    every part, one after the other
  python benchmarks/gpu.py --out DIR --part 1 --budget 540
  python benchmarks/gpu.py --out DIR --tiny             rehearses on a CPU

It needs an unpacked checkout and the packages that mxjax imports, installed or not
itself. Every question is a script of its own that a user can start alone, in a process
with a time limit: one that raises, hangs or crashes costs itself only, and what it had
measured stays. `DIR/NAME.json` is its result, `DIR/NAME.log` what it printed, and
`DIR/gpu_PARTS.json`, written after every question, has the verdicts. A part takes nine
minutes at most.

A goal counts only if every kernel passed its check, in this call or, for later parts,
in the result that `--checks` names. The last lines are one table of goals.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
CHECKS = "checks"
PART_SECONDS = 540
CANDIDATES = "undivided", "stream-K", "fused"
"""Products whose steps of decoding are timed."""
QUESTIONS = {
  CHECKS: ("gpu_checks.py", ()),
  "evaluate": ("gpu_evaluate.py", ()),
  "generate": ("gpu_generate.py", ()),
  "caches": ("gpu_generate.py", ("--cache", "--parts", "bf16", "hires")),
  "build small": ("gpu_build.py", ("--only", "small hires")),
  "build small, next": ("gpu_build.py", ("--only", "small hires-next")),
  "build 8B": ("gpu_build.py", ("--only", "8B hires")),
  "build 8B, next": ("gpu_build.py", ("--only", "8B hires-next")),
  "kernels": ("gpu_kernels.py", ()),
  "float8 rows": ("gpu_float8_rows.py", ()),
  "stream-K": ("gpu_kernels.py", ("--candidate", "float8 stream-K")),
  "fused": ("gpu_kernels.py", ("--candidate", "float8 fused")),
  "undivided": ("gpu_kernels.py", ("--candidate", "int8 undivided")),
  **{
    f"steps, {name}": (
      "gpu_generate.py",
      ("--parts", "bf16", "hires", "--candidate", candidate),
    )
    for name, candidate in (
      ("undivided", "int8 undivided"),
      ("stream-K", "float8 stream-K"),
      ("fused", "float8 fused"),
    )
  },
}
"""Scripts and their options, by name."""
PARTS = {
  1: {CHECKS: 150, "evaluate": 180, "build small": 210},
  2: {"generate": 240, "build small, next": 300},
  3: {"build 8B": 470},
  4: {"kernels": 110, "float8 rows": 50, "build 8B, next": 380},
  5: {"caches": 240},
  6: {"stream-K": 540},
  7: {"fused": 540},
  8: {"undivided": 180, **{f"steps, {each}": 120 for each in CANDIDATES}},
}
"""Questions of each part in order, with their largest seconds."""


def tokens_over_torch(result, side, measure):
  """Tokens a second of a side of `gpu_evaluate.py`, over torch's."""
  parts = result["parts"]
  rate = lambda name: parts[name][measure]["tokens_per_s"]
  return rate(side) / rate("torch")


def first_over_torch(result, side):
  """Milliseconds to a first token of a side of `gpu_generate.py`, over torch's."""
  ms = lambda name: result["parts"][name]["first token 1 x 2048"]["ms"]
  return ms(side) / ms("torch")


def seconds_of(result, build):
  """Seconds of a build that ended well."""
  entry = result["builds"][build]
  return entry["seconds"] if entry["status"] == "ok" else math.nan


GOALS = {
  "likelihoods of 200 items, HiRes, first pass, s": (
    *("evaluate", 8.0, "at most"),
    lambda r: r["parts"]["hires"]["likelihoods"]["first_s"],
  ),
  "likelihoods, HiRes, tokens a second / torch": (
    *("evaluate", 1.0, "at least"),
    lambda r: tokens_over_torch(r, "hires", "likelihoods"),
  ),
  "likelihoods, our BF16, tokens a second / torch": (
    *("evaluate", 1.0, "at least"),
    lambda r: tokens_over_torch(r, "bf16", "likelihoods"),
  ),
  "perplexity, HiRes, tokens a second / torch": (
    *("evaluate", 1.0, "at least"),
    lambda r: tokens_over_torch(r, "hires", "perplexity"),
  ),
  "first token of 2,048, HiRes / torch": (
    *("generate", 1.0, "at most"),
    lambda r: first_over_torch(r, "hires"),
  ),
  "first token of 2,048, our BF16 / torch": (
    *("generate", 1.1, "at most"),
    lambda r: first_over_torch(r, "bf16"),
  ),
  "a prompt in a new bucket, HiRes, s": (
    *("generate", 2.0, "at most"),
    lambda r: r["parts"]["hires"]["a new bucket"]["seconds"],
  ),
  **{
    f"{batch} x {context:,}, HiRes with E4M3, tokens a second / our BF16": (
      *("caches", goal, "at least"),
      lambda r, name=name: (
        r["parts"]["bf16"][name]["ms"]
        / r["parts"]["hires"][f"{name}, E4M3 cache"]["ms"]
      ),
    )
    for batch, context, goal, name in (
      (32, 2048, 2.0, "step, batch 32"),
      (32, 16384, 1.7, "step, batch 32 x 16,384"),
    )
  },
  **{
    f"small Qwen3 by {method}, {which}, s": (
      *(name, bound, "at most"),
      lambda r, build=f"small {method}, {which}": seconds_of(r, build),
    )
    for name, method, which, bound in (
      ("build small", "hires", "cold", 60.0),
      ("build small", "hires", "kept", 20.0),
      ("build small, next", "hires-next", "cold", 120.0),
      ("build small, next", "hires-next", "kept", 40.0),
    )
  },
  "8B by hires, cold, minutes": (
    *("build 8B", 2.5, "at most"),
    lambda r: r["whole_model_minutes"]["8B hires"],
  ),
}
"""The question that answers it, the bound, its sense, and where the value is."""


def execute(command, environment, limit, log):
  """Runs a question to its end or limit; returns how it ended, in words."""
  with log.open("w") as output:
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
      # Asked first, so that it ends what it started in groups of their own.
      process.send_signal(signal.SIGINT)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
  if code is None:
    return f"stopped after {limit:.0f} s"
  if code < 0:
    return f"killed by {signal.Signals(-code).name}"
  last = log.read_text(errors="replace").strip().splitlines() or [""]
  return f"exit code {code}: {last[-1][:200]}" if code else "ok"


class Run:
  """One call: its questions, how they ended, and the goals."""

  def __init__(self, options):
    self.options = options
    self.end = time.monotonic() + options.budget
    self.ended = {}

  def file(self, name):
    """Where a question writes its result."""
    return self.options.out / f"{name.replace(', ', '_').replace(' ', '_')}.json"

  def ask(self, name, limit):
    """Asks one question, as far as there is time."""
    script, words = QUESTIONS[name]
    left, start = self.end - time.monotonic(), time.monotonic()
    if not (HERE / script).is_file():
      status = "left out: no script"
    elif left < 5:
      status = "left out: no time"
    else:
      file = self.file(name)
      file.parent.mkdir(parents=True, exist_ok=True)
      command = [sys.executable, str(HERE / script), *words, "--out", str(file)]
      # Packages that are not installed may be found there.
      given = os.environ.get("PYTHONPATH", "")
      environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), given])),
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
      }
      # What compiles is what a user waits for.
      environment.pop("JAX_COMPILATION_CACHE_DIR", None)
      if self.options.tiny:
        command.append("--tiny")
        environment["JAX_PLATFORMS"] = "cpu"
        limit = left  # A busy CPU says nothing of how long a GPU takes.
      if script == "gpu_build.py":
        command += ["--data", str(self.options.data)]
      status = execute(command, environment, min(limit, left), file.with_suffix(".log"))
    self.ended[name] = {
      "status": status,
      "seconds": round(time.monotonic() - start, 1),
    }
    print(f"{name}: {status}, {self.ended[name]['seconds']} s", flush=True)
    if (table := self.file(name).with_suffix(".md")).is_file():
      print(table.read_text(), flush=True)
    self.save()

  def result(self, name):
    """What a question wrote, empty if it wrote nothing."""
    file = self.file(name)
    return json.loads(file.read_text()) if file.is_file() else {}

  def failed_checks(self):
    """Names of the kernels that failed; None if not all were checked."""
    file = self.options.checks or self.file(CHECKS)
    if not file.is_file():
      return None
    checked = json.loads(file.read_text())
    entries = checked["checks"]
    if set(entries) != set(checked["all checks"]):
      return None
    return [name for name, entry in entries.items() if not entry["passed"]]

  def goals(self):
    """Verdicts by goal, of the questions that were asked."""
    failed, found = self.failed_checks(), {}
    for name, (question, bound, sense, value_of) in GOALS.items():
      if question not in self.ended:
        continue
      try:
        value = float(value_of(self.result(question)))
      except (KeyError, TypeError, ZeroDivisionError):
        value = math.nan
      is_met = value >= bound if sense == "at least" else value <= bound
      verdict = "met" if is_met else "not met"
      if failed is None or failed:
        verdict = f"void: {', '.join(failed or ['kernels were not checked'])}"
      elif math.isnan(value):
        verdict = "not measured"
      value = None if math.isnan(value) else value
      found[name] = {"value": value, "goal": f"{sense} {bound}", "verdict": verdict}
    return found

  def save(self):
    """Writes what is known; on a full disk it is printed instead."""
    document = {
      "command": f"python benchmarks/{pathlib.Path(__file__).name}",
      "date": datetime.date.today().isoformat(),
      "parts": self.options.part,
      "questions": self.ended,
      "goals": self.goals(),
    }
    text = json.dumps(document, indent=1)
    try:
      self.options.out.mkdir(parents=True, exist_ok=True)
      parts = "".join(map(str, self.options.part))
      (self.options.out / f"gpu_{parts}.json").write_text(text + "\n")
    except OSError as error:
      print(f"gpu: cannot write {self.options.out}: {error}; so far:\n{text}")

  def summary(self):
    """Prints the table; returns whether every question was answered."""
    rows = [["question or goal", "value", "goal", "verdict"], ["---"] * 4]
    for name, entry in self.ended.items():
      rows.append([name, f"{entry['seconds']} s", "", entry["status"]])
    for name, goal in self.goals().items():
      value = "-" if goal["value"] is None else f"{goal['value']:.2f}"
      rows.append([name, value, goal["goal"], goal["verdict"]])
    print("\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows), flush=True)
    is_done = all(entry["status"] == "ok" for entry in self.ended.values())
    return is_done and not self.failed_checks()


def main():
  """Asks the questions of the parts in turn."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder")
  parser.add_argument("--part", type=int, choices=PARTS, nargs="+", default=list(PARTS))
  parser.add_argument("--only", nargs="+", choices=QUESTIONS, help="these questions")
  help = f"seconds of all of it; {PART_SECONDS} a part if it is left out"
  parser.add_argument("--budget", type=float, help=help)
  parser.add_argument("--checks", type=pathlib.Path, help="checks of an earlier call")
  data = HERE.parent.parent / "shared" / "data"
  parser.add_argument("--data", type=pathlib.Path, default=data, help="folder of texts")
  parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU")
  options = parser.parse_args()
  options.out, options.data = options.out.resolve(), options.data.resolve()
  options.budget = options.budget or PART_SECONDS * len(options.part)
  run = Run(options)
  for part in options.part:
    for name, limit in PARTS[part].items():
      if not options.only or name in options.only:
        run.ask(name, limit)
  return 0 if run.summary() else 1


if __name__ == "__main__":
  sys.exit(main())
