"""What a search is about: candidates, residuals, packets, verdicts, outcomes."""
