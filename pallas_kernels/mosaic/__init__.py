"""Mosaic GPU forms of kernels, for jax 0.11 and newer.

JAX 0.11 deprecates Triton in Pallas and keeps `kernel` of Mosaic GPU. These forms are
compiled for sm_90a and interpreted, and an H200 ran them, all but `stream_k.py` and
`fused.py`, which are candidates; `choice.py` takes the one that was faster there.
"""
