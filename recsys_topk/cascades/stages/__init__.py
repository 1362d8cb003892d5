"""The stages: one file each, found by name."""
