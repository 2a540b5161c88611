"""Pallas kernels with the same contract as the reference functions."""
