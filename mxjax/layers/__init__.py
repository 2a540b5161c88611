"""The quantized linear: the typed leaf of the params tree, and how it is applied."""
