"""Files: checkpoints and exports to other formats."""
