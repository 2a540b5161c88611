"""Pure functions on arrays: the MXFP4 format and the mathematics of every stage."""
