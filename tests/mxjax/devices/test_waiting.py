"""Programs of decompositions and products that once waited for ever on two cores."""

import os
import subprocess
import sys

import pytest

CALLS, SECONDS = 600, 90
"""A program that waits for ever did so within 200 calls, of 3 ms each."""

CHARTS = f"""
import functools, jax.numpy as jnp, numpy as np
from mxjax.devices import execution
from mxjax.methods.hires import stage1
from mxjax.numerics import precision
from mxjax.numerics.shaping import reference_chart

with precision.float64_scope():
  x = np.random.default_rng(0).standard_normal((2, 18, 32, 80))
  moments = [jnp.asarray(part @ part.mT) for part in jnp.asarray(x)]
  for chart in (reference_chart.reference_chart, reference_chart.geometric_chart):
    charts = functools.partial(stage1._charts, chart=chart, max_condition=8.0)
    for _ in range({CALLS}):
      execution.call_in_batches(charts, *moments)
"""


@pytest.mark.slow
def test_charts_of_a_wide_linear_end():
  """In a process of its own, which can be ended, compiled as users compile it."""
  ours = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
  subprocess.run(
    [sys.executable, "-c", CHARTS], env=os.environ | ours, check=True, timeout=SECONDS
  )
