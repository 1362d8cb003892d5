"""Losses of lists: targets, top-k losses, the joint objective, pairs."""
