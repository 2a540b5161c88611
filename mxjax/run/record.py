"""The record of a run: what each linear's codes cost, what each stage took.

The errors and rates of a linear are measured on a few calibration tokens.
"""

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.calibration.calibration import Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.program import fold
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import (
  Clipped,
  FewCodes,
  Nearest,
  OneCode,
  Unrounded,
)

PROBE_TOKENS = 256
"""Calibration tokens on which each linear's error is measured for the report."""
LOCAL_OBJECTIVES = ("local_sensitivity", "local_mismatch")
"""Entries of `local_objectives` relative to nearest rounding."""

ROUNDING_NAMES = {
  Nearest: "nearest",
  OneCode: "one-code",
  FewCodes: "few codes",
  Clipped: "clipped",
  Unrounded: "none",
}


def peak_memory_bytes() -> int:
  """Returns the peak resident memory of this process so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # Linux counts kibibytes here, macOS bytes.
  return peak if sys.platform == "darwin" else peak * 1024


@dataclasses.dataclass
class StageClock:
  """Wall seconds and peak memory by stage, of all processes of a resumed run."""

  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)

  @contextmanager
  def stage(self, name: str) -> Iterator[None]:
    """Adds the time of the `with` block to a stage."""
    start = time.perf_counter()
    yield
    spent = time.perf_counter() - start
    self.seconds[name] = self.seconds.get(name, 0.0) + spent
    peak = self.peak_bytes.get(name, 0)
    self.peak_bytes[name] = max(peak, peak_memory_bytes())


@dataclasses.dataclass(frozen=True)
class QuantizationRecord:
  """The measurements that a report shows, JSON-ready through `to_dict`."""

  program: dict[str, Any]
  contract_hash: str
  calibration: dict[str, Any]  #: Fingerprint and shape of the calibration tokens.
  layers: list[dict[str, Any]]  #: By layer: `linears` by path, `recovery` by fit.
  clock: StageClock
  #: The sanity gate's comparison, or None if it was not run.
  sanity: dict[str, Any] | None = None
  #: What `Program.prepare` recorded.
  preparation: dict[str, Any] = dataclasses.field(default_factory=dict)
  #: One entry for every resume of a killed run: finished layers (`layer`), unfinished
  #: files that were `discarded`, and the mesh if it has `changed`.
  resumed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  #: Layers after which hidden states were written, so that a resume replays no more
  #: than these; None if none were.
  save_every: int | None = None
  #: Sizes of the axes and number of processes, or None for one device.
  mesh: dict[str, int] | None = None
  #: Divergence of every step of scale distillation, the chunks of each, and how far the
  #: factors, and the maps if they are learned, of each layer moved. If codes are
  #: learned, also the share of each layer's that changed.
  tuning: dict[str, Any] | None = None
  #: W4A4, or W4A16 for weights alone, which is outside the paper's contract.
  form: str = "W4A4"

  def to_dict(self) -> dict[str, Any]:
    """Converts the record to nested dicts that JSON can represent."""
    return dataclasses.asdict(self)


class Result(NamedTuple):
  """Quantized params, the run's record, and the float params that were quantized.

  `reference` are the given params unless the program rewrote them.
  """

  params: MutableMapping[str, Any]
  record: QuantizationRecord
  reference: Params


def _relative_error(
  x: jax.Array, weight: jax.Array, operand: jax.Array, decoded: jax.Array
) -> jax.Array:
  """Computes ||X^ W^' - X W'||^2 / ||X W'||^2; all but the last axis are features.

  Where X W' is zero, as of a dead linear, it returns the numerator alone.
  """
  x, weight, operand, decoded = (
    array.reshape(-1, array.shape[-1]) for array in (x, weight, operand, decoded)
  )
  # Full precision: the error is a difference of products that are nearly equal, and
  # TF32 on a GPU would hide it.
  dot = lambda a, b: jnp.einsum("dn,dm->nm", a, b, precision=HIGHEST)
  exact = dot(x, weight)
  error = dot(operand, decoded) - exact
  signal = jnp.square(exact).sum()
  # Not 0 / 0: the run folder holds records as JSON, which has no NaN.
  return jnp.square(error).sum() / jnp.where(signal > 0, signal, 1.0)


def local_objectives(
  mapped: jax.Array, operand: jax.Array, folded: jax.Array, decoded: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the block-local objectives of the one-code rule, summed over all tokens.

  Sensitivity is d'G_Q d with d = q - x, and mismatch is ||W^ q - W x||^2, over blocks.
  Paper: Table onecode-local.

  Args:
    mapped: The blocks x before rounding, float32 `[blocks, 32, tokens]`.
    operand: The blocks q, as `mapped`.
    folded: Weights W in the map's coordinates, float32 `[blocks, 32, out_features]`.
    decoded: Realized weights W^, as `folded`.
  """
  # With q = x + d, G = W^'W^ and K = W^'(W - W^): ||W^q - Wx||^2 = d'G d - 2 d'K x +
  # ||(W^ - W) x||^2, without an array of outputs.
  gram, cross = one_code.tables(folded, decoded)
  gap = decoded - folded
  gap_gram = jnp.einsum("bim,bjm->bij", gap, gap, precision=HIGHEST)
  form = lambda a, matrix, b: jnp.einsum(
    "bin,bij,bjn->", a, matrix, b, precision=HIGHEST
  )
  moved = operand - mapped
  sensitivity = form(moved, gram, moved)
  mismatch = form(mapped, gap_gram, mapped) - 2.0 * form(moved, cross, mapped)
  return sensitivity, sensitivity + mismatch


@compilation.jit()
def _probe(
  x: jax.Array, weight: jax.Array, folded: jax.Array, leaf: QuantizedLinear
) -> dict[str, jax.Array]:
  rules, of_inputs = leaf.rules, leaf.rounding.scale_rules(leaf.rules)
  rounded = lambda blocks: mxfp4.round_blocks(blocks, rules)
  mapped = x if leaf.input_map is None else leaf.input_map.apply(x)
  nearest = mxfp4.round_blocks(mapped, of_inputs)
  decoded = mxfp4.decode(leaf.weight, jnp.float32).T
  one = jnp.float32(1)
  result = {
    "error_rtn": _relative_error(x, weight, rounded(x), rounded(weight)),
    "error_mapped_rtn": _relative_error(
      mapped, folded, rounded(mapped), rounded(folded)
    ),
    "error_mapped_nearest": _relative_error(mapped, folded, nearest, decoded),
    "edit_rate": jnp.float32(0),
    **dict.fromkeys(LOCAL_OBJECTIVES, one),
  }
  result["error_final"] = result["error_mapped_nearest"]
  # None is a rule that may edit any code; only 0 promises the nearest ones.
  is_nearest = leaf.rounding.edits == 0
  operand = nearest if is_nearest else leaf.rounding.round(mapped, rules)
  if not is_nearest:
    result["error_final"] = _relative_error(mapped, folded, operand, decoded)
    blocks = decoded.reshape(folded.shape)
    ours, theirs = (
      local_objectives(mapped, rounded, folded, blocks)
      for rounded in (operand, nearest)
    )
    for name, a, b in zip(LOCAL_OBJECTIVES, ours, theirs, strict=True):
      result[name] = a / jnp.where(b > 0, b, 1.0)
  if leaf.rounding.edits:
    result["edit_rate"] = (operand != nearest).any(-2).mean(dtype=jnp.float32)
  # E2M1 ends at 6 times the scale; the floor rule leaves a block's largest value below
  # 8 times it.
  exponent = mxfp4.block_exponent(mapped, of_inputs)
  limit = 6.0 * mxfp4.scale_of(exponent)[..., None, :]
  result["saturated_activations"] = (jnp.abs(mapped) > limit).mean(dtype=jnp.float32)
  # Without the sign bit, 7 is the magnitude 6.
  codes = mxfp4.unpack(leaf.weight.codes) & jnp.uint8(7)
  result["top_code_weights"] = (codes == 7).mean(dtype=jnp.float32)
  result["activation_exponents"] = exponent
  # The bias of E8M0; widened first, because the difference of bytes would wrap around.
  result["weight_exponents"] = leaf.weight.scales.astype(jnp.int32) - 127
  return result


def linear_record(
  weight: jax.Array,
  leaf: QuantizedLinear,
  inputs: LinearInputs,
  hook_record: Mapping[str, Any] = {},
  *,
  probe: bool = True,
) -> dict[str, Any]:
  """Describes one quantized linear and measures it on a few calibration tokens.

  `weight` is the float weight `[out_features, in_features]` that `leaf` replaces, and
  `hook_record` is what the program's hooks recorded.

  Returns:
    `hook_record`, the dtype of the Hessian's products if there was one, shape, names
    of map and rounding, and with `probe`: relative squared output errors (`error_rtn`
    in native coordinates, `error_mapped_rtn` after the map, `error_mapped_nearest` with
    the final weights, `error_final` with the final A4 rule), edit rate, exponent
    histograms, saturation rates.
  """
  record: dict[str, Any] = dict(hook_record)
  if inputs.hessian_products:
    record["hessian_products"] = inputs.hessian_products
  record["shape"] = list(weight.shape)
  record["map"] = type(leaf.input_map).__name__ if leaf.input_map else "none"
  rule = type(leaf.rounding)
  # A rule from outside the library, such as a candidate's, is named by its class.
  record["rounding"] = ROUNDING_NAMES.get(rule, rule.__name__)
  if not probe:
    return record
  blocks = mxfp4.weight_blocks(weight)
  # Folded as for the codes and not within `_probe`: `fold` keeps LAPACK to one thread,
  # and so gives the same bits.
  folded = execution.block_on_cpu(fold(blocks, leaf.input_map))
  probed = execution.block_on_cpu(
    _probe(inputs.probe(PROBE_TOKENS), blocks, folded, leaf)
  )
  for name, value in probed.items():
    array = np.asarray(value)
    if not array.ndim:
      record[name] = float(array)
      continue
    exponents, counts = np.unique(array, return_counts=True)
    record[name] = {
      str(e): int(count) for e, count in zip(exponents, counts, strict=True)
    }
  return record
