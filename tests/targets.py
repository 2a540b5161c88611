"""Devices that are not here, as the choice of kernels sees them.

Tests put one in the place of `implementations.target`; nothing can be run then.
"""

from mxjax.numerics.implementations import Target

TURING = Target("gpu", "Tesla T4", (7, 5), 40)
AMPERE = Target("gpu", "NVIDIA A100", (8, 0), 108)
ADA = Target("gpu", "NVIDIA L4", (8, 9), 58)
HOPPER = Target("gpu", "NVIDIA H200", (9, 0), 132)
BLACKWELL = Target("gpu", "NVIDIA B200", (10, 0), 148)
AMD = Target("gpu", "AMD Instinct MI300X", None, 304)
TPU = Target("tpu", "TPU v6e")
CPU = Target("cpu", "cpu")
