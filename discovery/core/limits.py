"""What one candidate may take, as the sandbox enforces it and a prompt tells it."""

OPERATIONS = 4_000
"""Operations of the traced program of one hook, a loop's body counted once."""
CONSTANT_BYTES = 40 * 1024
"""Five 32 x 32 matrices in float64: enough for structure, too little for weights."""
VALUE_BYTES = 256 << 20
"""Bytes of all values that one unit computes, or else `TIMES_DECLARED` times those of
its arguments and results; what a loop computes counts once."""
TIMES_DECLARED = 64
FLOPS = 1 << 36
"""Floating-point operations of one unit, a loop's counted once: seconds of one core.
What loops add to that ends at the time limit of a call."""
TRACE_SECONDS = 180.0
CALL_SECONDS = 600.0
"""Seconds of one phase of an evaluator call, compilation included."""
