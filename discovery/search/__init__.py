"""The search loop: register an experiment, run its controls, compile its verdict."""
