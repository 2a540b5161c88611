"""RTN: strict rounding of weights and activations, without calibration data."""

from mxjax.methods.program import Program

RTN = Program(name="rtn")
