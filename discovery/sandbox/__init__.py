"""Isolation of candidates: the jail, its workers, and the gate for artifacts."""
