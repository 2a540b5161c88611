"""Measures of a model: perplexity, agreement, operator error, Fit-3 and Fit-7."""
