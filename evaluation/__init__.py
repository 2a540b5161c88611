"""Perplexity, operator error, reports, and the command line."""
