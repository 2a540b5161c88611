"""Devices that are not here, as the choice of kernels and JAX's lowering see them.

Tests put one in the place of `implementations.target`; nothing can be run then.
"""

import jax
from jax._src import mesh

from mxjax.numerics.implementations import Target

TURING = Target("gpu", "Tesla T4", (7, 5), 40)
AMPERE = Target("gpu", "NVIDIA A100", (8, 0), 108)
ADA = Target("gpu", "NVIDIA L4", (8, 9), 58)
HOPPER = Target("gpu", "NVIDIA H200", (9, 0), 132)
BLACKWELL = Target("gpu", "NVIDIA B200", (10, 0), 148)
AMD = Target("gpu", "AMD Instinct MI300X", None, 304)
TPU = Target("tpu", "TPU v6e")
CPU = Target("cpu", "cpu")


def lowered_for_a_gpu(function, *operands):
  """The program of a function for an H100 that need not be there, as text.

  JAX 0.11 lowers a kernel of Triton only where it knows of a GPU.
  """
  gpu = mesh.AbstractDevice("NVIDIA H100", 132, "gpu")
  auto = (jax.sharding.AxisType.Auto,)
  gpu = jax.sharding.AbstractMesh((1,), ("x",), auto, abstract_device=gpu)
  with jax.sharding.use_abstract_mesh(gpu):
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
