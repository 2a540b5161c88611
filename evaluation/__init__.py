"""Perplexity, operator error, tasks, reports, and the command line."""
