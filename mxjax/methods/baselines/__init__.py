"""The baselines of the paper's comparison and control methods, one file each."""
