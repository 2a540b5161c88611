"""Candidates from typed expression trees, varied and recombined by draws."""
