"""Reads a run back from its folder: explanation, report and verification."""
