"""The commands, one file each: `add_parser` defines the options, `run` does the work.

These files import JAX only inside `run`, so that help is instant.
"""
