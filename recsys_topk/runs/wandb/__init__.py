"""W&B: the logger of a run, its environment variables, and the lineage of data and weights."""
