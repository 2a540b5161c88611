"""Calibration data, hidden states layer by layer, and statistics of linear inputs."""
