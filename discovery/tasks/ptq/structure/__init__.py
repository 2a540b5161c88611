"""Hooks on the structure of the network: recovery fits, and the order of channels."""
