"""GPTQ: second-order reconstruction of the weights, nearest activations.

The original quantizes integer groups with lagged scales. Under our contract, groups are
physical Block32 blocks, a block's exponent comes from its compensated weights when it
is reached (`fresh`), columns go in natural order, and the Hessian is that of the float
model's inputs before A4. The paper does not state the order, the scale source, or
whether inputs come from the float or the quantized model; these assumptions are options
here. Unlike the original, dead inputs are not zeroed; damping handles them.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.methods.options import Share
from mxjax.methods.program import Program, Realization
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import code_descent, gptq, two_sided
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.shaping.input_maps import InputMap
from mxjax.pallas_kernels import gptq as gptq_kernel

Order = Literal["natural", "activation"]


def not_definite(inputs: LinearInputs, damping: float) -> ValueRefusal:
  """Builds the error for a Hessian that no damping tried makes positive definite."""
  # The last one that `gptq.factor` tried.
  damping *= gptq.DAMPING_GROWTH ** (gptq.DAMPING_TRIES - 1)
  return ValueRefusal(
    "gptq",
    expected=f"a Hessian that is positive definite with damping up to {damping:g}",
    got=f"one that is not, of {inputs.tokens} tokens and width "
    f"{inputs.blocks * mxfp4.BLOCK_SIZE}",
    mend="calibrate with more tokens and check the inputs for overflow",
  )


def reconstruct(
  weight: jax.Array,
  inputs: LinearInputs,
  input_map: InputMap | None,
  damping: float = gptq.DAMPING,
  scales: gptq.ScaleSource = "fresh",
  *,
  order: Order = "natural",
  descent: int = 0,
  output_moment: jax.Array | None = None,
) -> tuple[gptq.Reconstruction, dict[str, Any]]:
  """Runs GPTQ in the coordinates of a map, from the shared raw Hessian.

  `weight` is folded, float32 `[blocks, 32, out_features]`; `inputs` are in native
  coordinates. `damping` is the first relative damping tried; the one that succeeds is
  in the record, which is returned beside the codes. `descent` counts passes of
  `code_descent` afterwards. With the moment of output gradients, float32
  `[rows, rows]`, rows compensate each other, in natural order; see `two_sided`.

  Raises:
    ValueError: No damping tried made the Hessian positive definite.
  """
  # The mapped Hessian and the factor are as large as this one: a trim before each.
  raw = inputs.hessian()
  execution.trim_malloc(raw.nbytes)
  hessian = conjugated(raw, input_map)
  columns, ordered = None, hessian
  if order == "activation":
    columns = gptq.descending_curvature(hessian)
    ordered = execution.block_on_cpu(hessian[columns[:, None], columns[None, :]])
  execution.trim_malloc(raw.nbytes)
  factor = execution.block_on_cpu(gptq.factor(ordered, damping=damping))
  # Free what the solve does not read before it allocates.
  curvature = hessian if descent or output_moment is not None else None
  del hessian, ordered
  used = float(factor.damping)
  # NaN: no damping made it definite.
  if used != used:
    raise not_definite(inputs, damping)
  record = {"damping": used}
  if output_moment is not None:
    codes = _two_sided(
      weight=weight,
      upper=factor.upper,
      moment=output_moment,
      hessian=curvature,
      damping=jnp.float32(used),
      rules=inputs.rules,
      scales=scales,
      descent=descent,
    )
    return codes, record
  solve = _SolveRows(inputs.rules, scales, descent)
  operands = factor.upper, columns, curvature, jnp.float32(used)
  return inputs.placement.call_by_row(solve, weight, *operands), record


def _two_sided(
  weight: jax.Array,
  upper: jax.Array,
  moment: jax.Array,
  hessian: jax.Array | None,
  damping: jax.Array,
  rules: mxfp4.Rules,
  scales: gptq.ScaleSource,
  descent: int,
) -> gptq.Reconstruction:
  """Computes the codes of all rows together, on one device."""
  assert hessian is not None
  # The factor of outputs, as U is that of inputs.
  of_rows = execution.block_on_cpu(gptq.factor(moment)).upper
  coupled = execution.block_on_cpu(two_sided.coupling(of_rows))
  found = two_sided.reconstruct(
    weight, upper, coupled, hessian, damping, rules, scales=scales, passes=descent
  )
  return execution.block_on_cpu(found)


@dataclasses.dataclass(frozen=True)
class _SolveRows:
  """Computes the codes of each output row independently; hashable."""

  rules: mxfp4.Rules
  scales: gptq.ScaleSource
  descent: int

  def __call__(
    self,
    weight: jax.Array,
    upper: jax.Array,
    columns: jax.Array | None,
    hessian: jax.Array | None,
    damping: jax.Array,
  ) -> gptq.Reconstruction:
    if columns is not None:
      # Its exponents are static; `Gptq` refuses others in this order.
      result = gptq.reconstruct_ordered(weight, upper, columns, self.rules)
    elif self.scales != "fresh":
      # The kernel below has no source of exponents but `fresh`.
      result = gptq.reconstruct(weight, upper, self.rules, scales=self.scales)
    else:
      result = gptq_kernel.reconstruct(weight, upper, self.rules)
    if hessian is None:
      return result
    return code_descent.descend(
      weight, result, hessian, damping, self.rules, passes=self.descent
    )


@execution.jit()
def conjugated(hessian: jax.Array, input_map: InputMap | None) -> jax.Array:
  """Returns a raw Hessian `[d, d]` in the coordinates of a map."""
  return hessian if input_map is None else input_map.conjugate(hessian)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gptq(Program):
  """GPTQ weights and nearest activations in the coordinates of `shape`.

  Attributes:
    name: The name in results.
    damping: Added to the Hessian's diagonal, in units of its mean.
    scales: Where the exponent of a block comes from: its weights as compensated when
      the block is reached (`fresh`) or up to the last panel of 128 columns (`lagged`),
      its original weights (`static`), or a search over two exponents (`searched`).
    order: The order in which columns are rounded; `activation` begins with the largest
      diagonal entry of the Hessian and needs static `scales`.
  """

  name: str = "gptq"
  damping: Share = gptq.DAMPING
  scales: gptq.ScaleSource = "fresh"
  order: Order = "natural"

  def __post_init__(self) -> None:
    if self.order == "activation" and self.scales != "static":
      raise ValueRefusal(
        self.name,
        expected="scales=static for columns in order of activation, because a block "
        "whose columns are rounded at different times has no moment to find its scale",
        got=f"scales={self.scales}",
        mend="correct one of the two",
      )

  @override
  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realization:
    codes, record = reconstruct(
      weight, inputs, input_map, self.damping, self.scales, order=self.order
    )
    return Realization(codes, Nearest(), record=record)


GPTQ = Gptq()
