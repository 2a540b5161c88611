"""The tiny model quantized once a method, for the tests of all rooms and workers."""

import functools
import hashlib
import os

import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run.quantize import run
from tests.mxjax.made_once import made_once


@pytest.fixture(scope="session")
def tiny_calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens)


@pytest.fixture(scope="session")
def tiny_build(tiny_params, tiny_calib, tmp_path_factory):
  """Makes the result of a method, with its record, once in a run of the tests.

  The worker that asks first makes it; the others read it from the folder of the run.
  """
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent

  @functools.cache
  def build(method, contract=PAPER_CONTRACT):
    name = hashlib.sha256(f"{method} {contract.hash}".encode()).hexdigest()[:16]
    # Tests read only of HiRes what it measured of each linear.
    options = {"contract": contract, "check": False, "probe": method == "hires"}
    make = lambda: run(tiny_params, tiny_calib, methods.get(method), **options)
    return made_once(folder / f"tiny-{name}.pickle", make)

  return build


@pytest.fixture(scope="session")
def tiny_hires(tiny_build):
  """The result of HiRes, with its record."""
  return tiny_build("hires")
