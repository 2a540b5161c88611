"""The quantization run: Algorithm 1 layer by layer, its records and sanity gate."""
