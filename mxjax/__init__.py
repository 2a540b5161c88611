"""mxjax: strict MXFP4 post-training quantization of decoder LLMs in JAX."""
