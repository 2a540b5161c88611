"""Perplexity, operator error, tasks, tables of results, and reports."""
