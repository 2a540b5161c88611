"""Map, A4 encode and one-code refinement in one kernel, with fused inputs."""
