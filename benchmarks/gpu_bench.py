"""What the sections of `gpu.py` share: sizes, the clock, results and goals."""

import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import pathlib
import statistics
import time

import jax

GOALS = {
  "encode, share of copy bandwidth": (0.80, "at least"),
  "HiRes forward, times BF16": (1.10, "at most"),
  "HiRes forward, float8 products, times BF16": (1.00, "at most"),
  "HiRes decode, times BF16 tokens a second": (2.5, "at least"),
  "8B build, minutes": (5.0, "at most"),
}


class Bench:
  """What all sections share: sizes, results and the clock."""

  def __init__(self, options):
    self.smoke, self.out = options.smoke, pathlib.Path(options.out)
    self.how = "interpret" if options.smoke else "pallas"
    # None: the runtime's own choice, which is what a user gets.
    self.runtime = "interpret" if options.smoke else None
    self.start, self.budget = time.perf_counter(), options.budget
    self.results, self.goals = {}, {}
    # The compiler takes one core and seconds for a kernel.
    self.pool = concurrent.futures.ThreadPoolExecutor(8)

  def size(self, real, tiny):
    return tiny if self.smoke else real

  def warm(self, calls):
    """Compiles and runs each `(function, arguments)` once, side by side."""
    run = lambda call: jax.block_until_ready(call[0](*call[1]))
    list(self.pool.map(run, calls))

  def seconds(self, function, *arguments, batches=5):
    """Median seconds a call: batches of calls that take at least 20 ms."""
    call = lambda: jax.block_until_ready(function(*arguments))
    call(), call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    count = 1 if self.smoke else min(max(1, int(0.02 / once)), 200)
    times = []
    for _ in range(1 if self.smoke else batches):
      start = time.perf_counter()
      for _ in range(count):
        result = function(*arguments)
      jax.block_until_ready(result)
      times.append((time.perf_counter() - start) / count)
    return statistics.median(times)

  def save(self):
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "numpy")
    document = {
      "command": f"python benchmarks/gpu.py{' --smoke' if self.smoke else ''}",
      "date": datetime.date.today().isoformat(),
      "device": device.device_kind,
      "platform": device.platform,
      "load": os.getloadavg()[0],
      "versions": {name: importlib.metadata.version(name) for name in packages},
      "seconds": time.perf_counter() - self.start,
      "goals": self.goals,
      "results": self.results,
    }
    self.out.parent.mkdir(parents=True, exist_ok=True)
    self.out.write_text(json.dumps(document, indent=1) + "\n")

  def goal(self, name, value):
    bound, sense = GOALS[name]
    is_met = value >= bound if sense == "at least" else value <= bound
    self.goals[name] = {"value": value, "goal": f"{sense} {bound}", "met": is_met}
