"""Processes that share one folder of compiled programs and one of statistics.

`PARALLEL_PROCESSES=10 PARALLEL_METHOD=hires` is the long form.
"""

import hashlib
import os
import subprocess
import sys

import pytest

from tests.mxjax.cli import square

PROCESSES = int(os.environ.get("PARALLEL_PROCESSES", "2"))
METHOD = os.environ.get("PARALLEL_METHOD", "gptq")
PROGRAM = """
import sys, numpy as np, mxjax
from mxjax import models
from mxjax.calibration.calibration import Calibration
from mxjax.devices import kept_programs
from mxjax.run.quantize import run

model_folder, caches, out, method = sys.argv[1:]
kept_programs.keep_compiled(caches + "/compiled")
model, params = models.from_pretrained(model_folder)
calib = Calibration(model, np.load(model_folder + "/ids.npy"))
run(
  params, calib, method, check=False, run_dir=out, store=caches + "/statistics"
)
"""


@pytest.mark.slow
def test_many_at_once_give_one_result(tmp_path):
  model, caches = square.write(tmp_path / "model"), tmp_path / "caches"
  started = [
    subprocess.Popen(
      [sys.executable, "-c", PROGRAM, *map(str, (model, caches, tmp_path / f"{i}"))]
      + [METHOD],
      cwd=square.ROOT,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(PROCESSES)
  ]
  errors = [one.communicate()[1] for one in started]
  assert [one.returncode for one in started] == [0] * PROCESSES, errors
  digests = {
    tuple(
      hashlib.sha256(file.read_bytes()).hexdigest()
      for file in sorted((tmp_path / f"{i}" / "layers").iterdir())
    )
    for i in range(PROCESSES)
  }
  assert len(digests) == 1 and len(digests.pop()) == 3
