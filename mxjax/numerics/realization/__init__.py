"""Stage II, discrete realization: GPTQ codes, A4 rules, one-code refinement."""
