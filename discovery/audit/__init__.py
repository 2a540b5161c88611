"""Reading a run afterwards: explanation, report, verification."""
