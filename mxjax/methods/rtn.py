"""RTN: the strict encoder on weights and activations, no calibration data."""

from mxjax.program import Program

RTN = Program(name="rtn")
