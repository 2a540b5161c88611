"""Stage I, geometric shaping: reference chart, interaction K, balance D, input maps."""
