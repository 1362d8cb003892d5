"""The benchmarks of `recsys-topk bench SUITE`. Each suite is a module with `add_arguments` and `run`."""
