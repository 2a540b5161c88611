"""Placement on one device or a mesh, jobs of several processes, and CPU execution."""
