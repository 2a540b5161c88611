"""What determines a run's output, and what may perturb it.

A run resumes only if its identity is equal; differences in the environment are
reported.
"""

import platform
from typing import Any

import jax

from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.store import params_digest
from mxjax.devices.placement import Placement
from mxjax.methods.program import Program
from mxjax.numerics.contract import Contract


def identity(
  params: Params, calib: Calibration, program: Program, contract: Contract
) -> dict[str, Any]:
  """Returns what determines a run's output (checked on resume), JSON-ready.

  It reads every weight.
  """
  config = getattr(calib.model, "config", None)
  return {
    "program": dict(program.describe()),
    "contract": contract.hash,
    "calibration": {
      "fingerprint": calib.fingerprint,
      "shape": list(calib.tokens.shape),
    },
    "model": None if config is None else config.to_dict(),
    "weights": params_digest(params),
  }


def environment(placement: Placement) -> dict[str, Any]:
  """Returns what may perturb a run's output (reported on resume), JSON-ready."""
  device = jax.devices()[0]
  return {
    "jax": jax.__version__,
    "machine": platform.machine(),
    "platform": device.platform,
    "device": device.device_kind,
    "mesh": placement.describe(),
  }
