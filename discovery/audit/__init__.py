"""Analysis of a finished run: explanation, report and verification."""
