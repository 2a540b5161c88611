"""Quantized linear layers: the pytree leaf in the params tree and how to apply it."""
