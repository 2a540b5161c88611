"""Attention of the newest tokens over cached keys and values."""
