"""The baselines of the paper's comparison, and controls: a file each."""
