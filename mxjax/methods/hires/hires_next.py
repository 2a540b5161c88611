"""HiRes for the model's predictions instead of each layer's outputs.

Three changes, none of which costs anything at run time: moments and the Hessian weight
tokens and outputs by the Fisher information (`mxjax.calibration.fisher`), codes are
those of `hires-descent`, and scale distillation (`mxjax.methods.scale_distillation`)
moves the input maps after recovery is fitted. Not in the paper: see
`docs/results/hires_next.md`.
"""

from mxjax.methods.hires.hires import HiResDescent
from mxjax.methods.scale_distillation import ScaleDistillation

HIRES_NEXT = HiResDescent(
  name="hires-next", weighting="fisher", tune=ScaleDistillation()
)
