"""HiRes: the method of the paper, its balance search, variants and ablations."""
