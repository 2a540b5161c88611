"""Files: checkpoints, the run folder with its journal, exports to other formats."""
