"""Which kernel multiplies by packed weights: one table, by rows and device.

`implementations.choose` decides whether an operation runs by kernels at all. Where an
operation has more than one, this table decides, by what was measured. Operations that
are not in it have one kernel, Triton's; Mosaic's other forms lose to those, and only
tests and benchmarks call them. A kernel that no GPU has run yet is a candidate: nothing
but `trying` selects it.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from mxjax.numerics import implementations
from mxjax.numerics.implementations import FLOAT8, Capability
from mxjax.pallas_kernels.mosaic import device, fused, stream_k
from mxjax.pallas_kernels.mosaic import products as mosaic
from mxjax.pallas_kernels.refinement.fused_inputs import SINGLE_ROWS
from mxjax.pallas_kernels.refinement.one_code import Form


@dataclasses.dataclass(frozen=True)
class Product:
  """A way to multiply inputs `[n, d]` by a packed weight `[m, d]`.

  Attributes:
    name: What multiplies.
    inputs: Form in which it reads the inputs.
    rows: Fewest n for which it is chosen.
    measured: File with the times that put it here; None of a candidate.
    least: Least compute capability.
    only: The only compute capability for which it can be made, or None.
    most: Most n for which it is chosen, or None.
    adds: Whether it can add its results to an array in its own launch.
    refines: Whether it takes inputs that are not refined, in bfloat16.
  """

  name: str
  inputs: Form
  rows: int
  measured: str | None
  least: Capability = implementations.KERNELS
  only: Capability | None = None
  most: int | None = None
  adds: bool = False
  refines: bool = False


INT8 = Product("int8", "int8", 1, "benchmarks/results/gpu/h200_1_kernels.json")
PACKED = Product(
  "packed", "planes", SINGLE_ROWS + 1, "benchmarks/results/gpu/h200_1_kernels.json"
)
LIBRARY = Product(
  "library", "values", 256, "benchmarks/results/gpu/h200_1_kernels.json"
)
"""The weight decoded to bfloat16 by a kernel, then the library's product."""
FLOAT8_LIBRARY = Product(
  "float8 library",
  "float8",
  256,
  "benchmarks/results/gpu/h200_1_kernels.json",
  least=FLOAT8,
)
"""The weight decoded to float8 by a kernel, then the library's product."""
FLOAT8_MOSAIC = Product(
  "float8 Mosaic",
  "float8",
  mosaic.ROWS,
  "benchmarks/results/gpu/h200_4_tiles.json",
  least=device.HOPPER,
  only=device.HOPPER,
)
"""Mosaic's product, which decodes weights in registers."""
FLOAT8_STREAM = Product(
  "float8 stream-K",
  "float8 by blocks",
  SINGLE_ROWS + 1,
  None,
  least=device.HOPPER,
  only=device.HOPPER,
  most=511,
)
"""Mosaic's product with its steps divided over all multiprocessors, several linears a
launch."""
INT8_UNDIVIDED = Product("int8 undivided", "int8", 1, None, most=SINGLE_ROWS, adds=True)
"""The product `INT8` without partial sums, and with the residual added inside."""
FLOAT8_FUSED = Product(
  "float8 fused",
  "values",
  1,
  None,
  least=device.HOPPER,
  only=device.HOPPER,
  most=fused.ROWS,
  refines=True,
)
"""The stream-K product with the refinement of its inputs in the same launch."""
# An entry takes all rows from its number on: where several can run, the one that was
# measured to be faster stands first.
TABLE = (FLOAT8_MOSAIC, FLOAT8_LIBRARY, LIBRARY, PACKED, INT8)
"""The first that can run is taken."""
_OBSTACLES = {
  FLOAT8_MOSAIC: mosaic.obstacle,
  FLOAT8_STREAM: stream_k.obstacle,
  FLOAT8_FUSED: fused.obstacle,
}
"""What says of inputs `(n, d)` and m outputs why a kernel cannot multiply them."""
CANDIDATES = (FLOAT8_STREAM, INT8_UNDIVIDED, FLOAT8_FUSED)
"""What is not in the table until a GPU has measured it."""
_tried: contextvars.ContextVar[tuple[Product, ...]] = contextvars.ContextVar(
  "_tried", default=()
)


@contextlib.contextmanager
def trying(candidate: Product) -> Iterator[None]:
  """Takes a candidate before the table, wherever it can run, in what is traced inside.

  For tests and benchmarks. A program that was compiled before keeps its products, and
  one that is compiled inside keeps the candidate.
  """
  token = _tried.set((candidate, *_tried.get()))
  try:
    yield
  finally:
    _tried.reset(token)


def product(
  rows: int, outputs: int, width: int, *, has_float8: bool, may_refine: bool = False
) -> Product:
  """Returns what multiplies x `[rows, width]` by a weight `[outputs, width]`.

  `has_float8` says whether the weight has a scale of float8 products; see
  `pack_for_inference`. `may_refine` says whether the caller has inputs that are not
  refined, in bfloat16, and tables of one structure for all linears. The device is the
  one that computations target; a kernel that is interpreted elsewhere is one that every
  device has.
  """
  capability, tried = implementations.target().capability, _tried.get()
  for entry in (*tried, *TABLE):
    fits = rows >= entry.rows and (entry.most is None or rows <= entry.most)
    fits &= has_float8 or not entry.name.startswith("float8")
    fits &= may_refine or not entry.refines
    fits &= capability is None or capability >= entry.least
    # A candidate may be interpreted where there is no such GPU.
    is_made = entry in tried and capability is None
    fits &= is_made or entry.only in (None, capability)
    if fits and entry in _OBSTACLES:
      fits = _OBSTACLES[entry]((rows, width), outputs) is None
    if fits:
      return entry
  # Only a device that is too old for kernels comes here, and its reference takes inputs
  # in any form.
  return INT8
