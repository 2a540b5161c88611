"""QuantForge: the discovery system."""
