"""`report.html`: a self-contained page with charts about quantization runs."""
