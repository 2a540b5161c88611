"""Mosaic GPU forms of kernels, for jax 0.11 and newer.

JAX 0.11 deprecates Triton in Pallas and keeps `kernel` of Mosaic GPU. These forms are
compiled for sm_90a and interpreted, and no GPU has run them; `lowering.backend`
chooses.
"""
