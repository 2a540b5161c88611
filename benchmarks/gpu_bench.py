"""What the sections of `gpu_sections.py` share: sizes, the clock and compilation."""

import concurrent.futures
import statistics
import time

import jax


class Bench:
  """What all sections share: sizes, implementations and the clock."""

  def __init__(self, smoke):
    self.smoke = smoke
    self.how = "interpret" if smoke else "pallas"
    # None: the runtime's own choice, which is what a user gets.
    self.runtime = "interpret" if smoke else None
    self.copy = float("nan")  # Bytes a second that a copy moves, once measured.
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
