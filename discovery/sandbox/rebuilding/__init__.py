"""Hooks rebuilt on the trusted side from the StableHLO of an artifact."""
