"""Mosaic GPU forms of kernels, in the form that jax keeps; no GPU has run them."""
