"""Benchmarks behind `recsys-topk bench SUITE`; each suite is a module with `add_arguments` and `run`."""
