"""Cascade objectives: one file each, found by name."""
