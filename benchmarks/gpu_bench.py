"""What the sections of `gpu_sections.py` share: sizes, the clock and compilation.

Times are the device's. A kernel of microseconds is shorter than starting it from
Python, so many of them form one program; and its operands rotate through more memory
than the second-level cache holds, because a model's weights do not stay there either.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import json
import pathlib
import re
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

ROTATED = 4 * 50 * 2**20
"""Bytes that operands rotate through: four times the second-level cache of an H200."""
MOST_SETS, MOST_CALLS = 32, 16
"""Sets of operands in a program, and calls in flight: JAX waits behind 32."""
HOST_BOUND = 0.9
"""Share of a call's time from which its start on the host decides it."""


class Bench:
  """What all sections share: sizes, implementations and the clock."""

  def __init__(self, smoke, folder=None):
    self.smoke, self.folder = smoke, folder
    self.how = "interpret" if smoke else "pallas"
    # None: the runtime's own choice, which is what a user gets.
    self.runtime = "interpret" if smoke else None
    # The compiler takes one core and seconds for a kernel.
    self.pool = concurrent.futures.ThreadPoolExecutor(8)

  def size(self, real, tiny):
    return tiny if self.smoke else real

  def earlier(self, name):
    """The result of an earlier section of this part, empty if there is none."""
    file = self.folder and self.folder / f"{name}.json"
    return json.loads(file.read_text()) if file and file.is_file() else {}

  def warm(self, calls):
    """Compiles and runs each `(function, arguments)` once, side by side."""
    run = lambda call: jax.block_until_ready(call[0](*call[1]))
    list(self.pool.map(run, calls))

  def rotating(self, function, arguments):
    """A program of a call for each of several copies of its arguments; how many."""
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))
    count = 2 if self.smoke else min(max(-(-ROTATED // max(nbytes, 1)), 2), MOST_SETS)
    # Operands of their own, or XLA would run one call for all.
    sets = [jax.tree.map(jnp.copy, arguments) for _ in range(count)]
    return jax.jit(lambda sets: [function(*each) for each in sets]), (sets,), count

  def measure_kernels(self, calls):
    """Times calls `name: (function, arguments)` as `measure`, with rotated operands."""
    programs = {name: self.rotating(*call) for name, call in calls.items()}
    self.warm([(run, sets) for run, sets, _ in programs.values()])
    return self.measure(programs)

  @contextlib.contextmanager
  def alone(self):
    """Holds back the measurements of other sections that run at the same time."""
    place = pathlib.Path(tempfile.gettempdir()) / "mxjax-gpu-measures"
    with place.open("a") as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      yield

  def measure(self, programs, batches=5):
    """Milliseconds of programs `name: (function, arguments, calls in it)`.

    All are timed, and then all again: the result has both medians and how far they are
    apart. `host_bound` says that the host took as long to start a program as the device
    to run it, so that the time is no device's.
    """
    with self.alone():
      rounds = [
        {
          name: self.once(run, *sets, batches=batches)
          for name, (run, sets, _) in programs.items()
        }
        for _ in range(2)
      ]
    results = {}
    for name, (_, _, count) in programs.items():
      runs = [each[name][0] / count for each in rounds]
      results[name] = {
        "ms": 1e3 * statistics.mean(runs),
        "runs_ms": [1e3 * seconds for seconds in runs],
        "spread": (max(runs) - min(runs)) / min(runs),
        "calls_in_a_program": count,
        "host_bound": max(each[name][1] for each in rounds) >= HOST_BOUND,
      }
    return results

  def once(self, function, *arguments, batches=5):
    """Median seconds of a call, and the share of it until the host had started it.

    Batches of calls that take at least 20 ms; compile and warm up before.
    """
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    taken = time.perf_counter() - start
    count = 1 if self.smoke else min(max(1, int(0.02 / taken)), MOST_CALLS)
    times, started = [], []
    for _ in range(1 if self.smoke else batches):
      start = time.perf_counter()
      for _ in range(count):
        result = function(*arguments)
      called = time.perf_counter()
      jax.block_until_ready(result)
      times.append((time.perf_counter() - start) / count)
      started.append((called - start) / count / times[-1])
      del result
    return statistics.median(times), statistics.median(started)

  def device_times(self, function, *arguments):
    """Milliseconds of one call's kernels by name, numbers behind a name left out.

    `busy_ms` is their sum, `span_ms` the time from the first to the end of the last.
    Where the profiler gives nothing, the result says why.
    """
    if self.smoke:
      return {}
    jax.block_until_ready(function(*arguments))
    try:
      with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
          jax.block_until_ready(function(*arguments))
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        return of_kernels(
          event
          for plane in planes
          if plane.name.startswith("/device:GPU")
          for line in plane.lines
          if line.name.startswith("Stream")
          for event in line.events
        )
    except Exception as error:  # A profile is beside the point of a section.
      return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def of_kernels(events):
  """Sums of a profile's events; see `Bench.device_times`."""
  total, count = collections.Counter(), collections.Counter()
  first, last = float("inf"), 0.0
  for event in events:
    name = re.sub(r"[._]\d+$", "", event.name)[:80]
    total[name] += event.duration_ns / 1e6
    count[name] += 1
    first = min(first, event.start_ns)
    last = max(last, event.start_ns + event.duration_ns)
  kernels = {name: [round(ms, 4), count[name]] for name, ms in total.most_common(40)}
  return {
    "busy_ms": sum(total.values()),
    "span_ms": (last - first) / 1e6,
    "events": sum(count.values()),
    "kernels": kernels,
  }
