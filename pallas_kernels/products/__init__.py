"""Products with packed MXFP4 weights, and with their float8 values."""
