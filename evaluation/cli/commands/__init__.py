"""The commands, one file each: `add_parser` for its options and `run` for its work.

These files import no JAX at their top, so that help is instant; `run` imports what it
needs.
"""
