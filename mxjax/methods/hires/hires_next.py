"""HiRes for the model's predictions instead of each layer's outputs.

Moments and the Hessian weight tokens and outputs by the Fisher information
(`mxjax.calibration.fisher`), which leaves fewer tokens that count; GPTQ therefore damps
the Hessian ten times as much, and compensates along both axes (`two_sided`). The chart
is the geometric mean of both moments. Codes are those of `hires-descent`, and the maps
are refitted to them (`map_refit` of the numerics), after which the activations' rule
needs no K_Q and changes up to two codes of a block (`few_codes`). Scale distillation
(`mxjax.methods.scale_distillation`) moves the input maps at the end; after it, recovery
brings nothing and is left out. Not in the paper: see `docs/results/hires_next.md`.
"""

from mxjax.methods.hires.hires import HiResDescent
from mxjax.methods.scale_distillation import ScaleDistillation

HIRES_NEXT = HiResDescent(
  name="hires-next",
  weighting="fisher",
  chart="geometric",
  max_condition=32.0,
  damping=0.1,
  refit_maps=True,
  changes=2,
  two_sided=True,
  recover=(),
  tune=ScaleDistillation(),
)
