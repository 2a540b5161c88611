"""Loaders of Hugging Face folders, hub ids, GGUF files and the embedded models."""
