"""Processor time of an evaluator call of `--task ptq`, before and after a change.

  python benchmarks/discovery_evaluator.py [--programs hires "call 15"] [--windows 32]

The task is that of the recorded run `tests/golden/ptq_by_a_model`, and programs are
those of its `champions.json` and of the library. Each side is a commit: its own package
in a process of its own, with the environment that its evaluator workers get. There the
programs run one after the other, both phases of a call in one process, and nothing is
used that an earlier process compiled. So the first call is that of a new worker, and
later ones are calls of new programs in a worker that has run others. Loading the model
and tracing the programs do not count.

Processor time is that of all threads of the process. The values of all observables and
the digests of what the hooks decided must be the same on both sides. The result is
written after every side, and goes on from the sides that it has.
"""

import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time

import common

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "golden" / "ptq_by_a_model"
BEFORE, AFTER = "398cef4c", "working tree"
SIDES = (BEFORE, AFTER)
TASK = ("objective", "calibration")


def task_of(windows):
  """The recorded task on the model that it searched, scored on so many windows."""
  from mxjax.discovery.tasks.ptq.task import PtqTask

  first = (RECORDED / "log.jsonl").read_text().splitlines()[0]
  recorded = json.loads(first)["task"]
  options = {name: recorded[name] for name in TASK}
  windows = [windows, recorded["windows"][1]]
  model = str(ROOT / "models" / "trained" / "llama")
  return PtqTask(model=model, windows=windows, **options)


def traced(names, windows):
  """Call and artifacts of each program, as workers are sent them."""
  from mxjax.discovery.core.store import Store
  from mxjax.discovery.sandbox.local_executor import LocalExecutor
  from mxjax.discovery.search.cached_evaluator import CachedEvaluator
  from mxjax.discovery.tasks.ptq import programs

  champions = json.loads((RECORDED / "champions.json").read_text())
  task = task_of(windows)
  executor = LocalExecutor(task)
  evaluator = CachedEvaluator(task, executor, Store(tempfile.mkdtemp()))
  calls = {}
  for name in names:
    source = champions[name] if name in champions else programs.source(name)
    call = evaluator.prepare(source).call
    artifacts = {c: executor.artifacts._data[c] for c in call.computation.values()}
    calls[name] = call._asdict(), artifacts
  return calls


def measure(traces, windows, out):
  """Runs the traced programs in this process, and writes seconds and values of each."""
  from mxjax.discovery.core.task import Call
  from mxjax.discovery.sandbox import artifact

  task = task_of(windows)
  table = artifact.ArtifactTable({s["name"]: s for s in task.interface.to_list()})
  sessions = {phase: task.open(phase) for phase in task.phases}
  rows = {}
  for name, (call, artifacts) in pickle.loads(traces.read_bytes()).items():
    for computation, (hook, data) in artifacts.items():
      table.add(computation, hook, data)
    payload, row = b"", {"seconds": {}, "values": {}, "outputs": {}}
    for phase, session in sessions.items():
      start = time.process_time()
      result, payload = session.run(Call(**call), table, payload)
      row["seconds"][phase] = round(time.process_time() - start, 1)
      row["values"] |= result.get("values", {})
      row["outputs"] |= result["outputs"]
    rows[name] = row
    print(f"  {name}: {row['seconds']} s", flush=True)
    out.write_text(json.dumps(rows))


def run_side(side, traces, windows, scratch):
  """Rows of a side, measured by its package in a process of its own."""
  tree = ROOT
  if side != AFTER:
    tree = scratch / side
    tree.mkdir()
    archive = subprocess.run(
      ["git", "archive", side], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "x", "-C", tree], input=archive.stdout, check=True)
  told = (
    "import json\nfrom mxjax.discovery.sandbox import supervisor\n"
    "print(json.dumps(supervisor._clean_environment()))"
  )
  # As a worker starts: nothing is inherited, and imports come from this tree.
  place = {"PYTHONPATH": str(tree)}
  asked = subprocess.run(
    [sys.executable, "-c", told],
    env={**os.environ, **place},
    check=True,
    capture_output=True,
  )
  environment = {**json.loads(asked.stdout), **place}
  out = scratch / "rows.json"
  words = ["--measure", str(traces), "--windows", str(windows), "--out", str(out)]
  subprocess.run(
    [sys.executable, str(pathlib.Path(__file__).resolve()), *words],
    env=environment,
    check=True,
  )
  return json.loads(out.read_text())


def total(row):
  return sum(row["seconds"].values())


def table(sides):
  """A line a program: processor seconds of both sides, and their ratio."""
  lines = []
  for name in dict.fromkeys(name for rows in sides.values() for name in rows):
    old, new = (sides.get(side, {}).get(name) for side in SIDES)
    told = lambda row: " + ".join(f"{s:.1f}" for s in row["seconds"].values())
    cells = [name, told(old) if old else "", told(new) if new else "", "", ""]
    if old and new:
      keys = "values", "outputs"
      is_same = all(old[key] == new[key] for key in keys)
      cells[3:] = [f"{total(new) / total(old):.2f}", "the same" if is_same else "other"]
    lines.append(cells)
  head = ["program", f"{BEFORE}, fit + measure, s", "now, s", "ratio", "values"]
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--programs", nargs="+", default=["hires", "call 15"])
  parser.add_argument("--windows", type=int, default=32, help="of the scored text")
  parser.add_argument("--measure", type=pathlib.Path, help="of the processes within")
  parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
  options = parser.parse_args()
  if options.measure:
    measure(options.measure, options.windows, options.out)
    return
  known = {"windows": options.windows, "programs": options.programs}
  earlier = common.read(options.out, {**known, "sides": {}})
  is_same = all(earlier[key] == value for key, value in known.items())
  sides = earlier["sides"] if is_same else {}
  made = common.stamp()
  with tempfile.TemporaryDirectory() as folder:
    scratch = pathlib.Path(folder)
    traces = scratch / "traces.pkl"
    traces.write_bytes(pickle.dumps(traced(options.programs, options.windows)))
    for side in options.sides:
      print(side, flush=True)
      sides[side] = run_side(side, traces, options.windows, scratch)
      common.write(options.out, {**made, **known, "sides": sides}, table(sides))


if __name__ == "__main__":
  main()
