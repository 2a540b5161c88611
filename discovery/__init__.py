"""QuantForge: discovery that turns experimental verdicts into code.

The nouns, one file each: `program` (a candidate's source), `residual` (a design
question and its explanations), `controls` (which conditions answer it cheapest),
`packet` (the experiment, frozen before its first call), `verdict` (what it showed),
`checkers` (whether the code really changed), `ledger` (what was paid), `frontier`
(what is kept), `proposer` (who suggests) and `search` (one round, top to bottom).
Discovery knows quantization only through a `task`.
"""
