"""Search problems: the synthetic world and post-training quantization."""
