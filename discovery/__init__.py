"""QuantForge: discovery that turns experimental verdicts into code.

`search.search.Search.round` is one round, top to bottom. Its nouns, a file each in
`core`: `candidate_source`, `residual` (a design question and its explanations),
`packet` (the experiment, frozen before its first call), `verdict` (what it showed),
`ledger` (what was paid), `proposal` (what a proposer is told and says). Beside the
round lie `controls` (the cheapest conditions that answer the question), `checkers`
(whether the code really changed) and `frontier` (retained programs, open questions).
`sandbox` runs candidates, and only `tasks` know quantization.
"""
