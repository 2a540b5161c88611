"""Plans of runs, sizes of models, and audits of results."""
