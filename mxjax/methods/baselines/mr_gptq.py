"""MR-GPTQ: a Hadamard on groups of up to 128 inputs, then GPTQ with static scales.

The original gives every linear a block Hadamard of one size (128 on its command line,
32 in its inference package), takes all scales from the transformed weights before any
compensation, and decodes with 2^E / 3. Our contract keeps transform, static scales and
natural order but uses its own codec and ties; scale search is off, the original's
default. The size is an assumption: 128, or where 128 does not divide the width the
larger of 64 and 32 that does; the record has the size used.
"""

from mxjax.methods.baselines.brq import BlockRotation

MR_GPTQ = BlockRotation(name="mr-gptq", sizes=(128, 64, 32), scales="static")
