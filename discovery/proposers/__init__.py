"""Proposers of the next program: edit templates, language models and people."""
