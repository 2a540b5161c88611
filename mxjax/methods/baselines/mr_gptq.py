"""MR-GPTQ: a Hadamard on groups of up to 128 inputs, then GPTQ with static scales.

The original gives every linear a block Hadamard of one size (128 on its command line,
32 in its inference package), takes all scales from the transformed weights before any
compensation, and decodes with 2^E / 3. Our contract keeps transform, static scales
and natural order, and replaces codec and ties by its own; scale search is left out,
as in the original's default. The size is an assumption: 128, or the largest of 64 and
32 that divides the width where 128 does not; what was used is in the record.
"""

from mxjax.methods.baselines.brq import BlockRotation

MR_GPTQ = BlockRotation(name="mr-gptq", sizes=(128, 64, 32), scales="static")
