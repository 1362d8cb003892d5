"""Data: the batch, RecFlow, its simulator, negative expansion."""
