"""Comparisons, streams and the experiments of the paper (one YAML file each, with question, protocol and runs)."""
