"""Stage I, geometric shaping: charts, the local interaction K, the balance D, maps."""
