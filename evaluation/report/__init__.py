"""`report.html`: a self-contained page about quantization runs, with its charts."""
