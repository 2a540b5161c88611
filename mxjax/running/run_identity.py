"""What decides the bits of a run, and what may: a resumed run is held to both."""

import platform
from typing import Any

import jax
from jax.sharding import Mesh

from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.store import params_digest
from mxjax.devices import mesh as meshes
from mxjax.methods.program import Program
from mxjax.numerics.contract import Contract


def identity(
  params: Params, calib: Calibration, program: Program, contract: Contract
) -> dict[str, Any]:
  """What decides the bits of a result, JSON-ready; it reads every weight."""
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


def environment(mesh: Mesh | None) -> dict[str, Any]:
  """What may decide low bits: a resumed run shows where it differs."""
  device = jax.devices()[0]
  return {
    "jax": jax.__version__,
    "machine": platform.machine(),
    "platform": device.platform,
    "device": device.device_kind,
    "mesh": meshes.describe(mesh),
  }
