"""`recsys-topk bench operators`: forward and backward of every operator, beside plain cross-entropy."""

from __future__ import annotations

import argparse

from recsys_topk.bench.isolated import add_arguments, run_suite
from recsys_topk.bench.result import BenchResult

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> BenchResult:
    """Run the suite."""
    return run_suite("operators", args)
