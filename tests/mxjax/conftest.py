"""The tiny model quantized once for the tests of several rooms."""

import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.run.quantize import run


@pytest.fixture(scope="session")
def tiny_calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens)


@pytest.fixture(scope="session")
def tiny_hires(tiny_params, tiny_calib):
  """The result of HiRes, with its record."""
  return run(tiny_params, tiny_calib, methods.HIRES, check=False)
