"""Loaders: Hugging Face folders, hub ids, GGUF files, the embedded models."""
