"""The tiny model quantized once for the tests of several rooms."""

import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.running import pipeline


@pytest.fixture(scope="session")
def tiny_calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens)


@pytest.fixture(scope="session")
def tiny_hires(tiny_params, tiny_calib):
  """The result of HiRes, with its record."""
  return pipeline.quantize_with_record(
    tiny_params, tiny_calib, methods.HIRES, check=False
  )
