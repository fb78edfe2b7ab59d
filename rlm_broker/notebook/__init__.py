"""Pages of runs and blocks for notebooks."""
