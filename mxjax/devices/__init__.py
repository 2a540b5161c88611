"""Meshes of devices, jobs of several processes, and how computations run on a CPU."""
