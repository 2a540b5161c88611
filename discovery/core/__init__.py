"""Vocabulary of a search: candidates, residuals, packets, verdicts and outcomes."""
