"""Algorithm 1: a quantizer runs over a model, layer by layer."""
