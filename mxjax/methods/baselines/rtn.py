"""RTN: the strict encoder on weights and activations, no calibration data."""

from mxjax.methods.program import Program

RTN = Program(name="rtn")
