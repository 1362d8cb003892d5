"""The benchmark suites by name: each is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from recsys_topk.bench.result import BenchResult

# name -> (module, what it measures)
SUITES = {
    "operators": ("isolated", "every top-k operator, forward and backward"),
    "losses": ("isolated", "every loss, forward and backward"),
    "data": ("data", "batches from disk, negatives"),
    "step": ("step", "a training step of the cascade"),
    "scale": ("scale", "training with sharded tables on one and on several processes"),
    "serve": ("serve", "search in a large catalogue, and the service under load"),
}


def add_arguments(suite: str, parser: argparse.ArgumentParser) -> None:
    """Add the options of a suite to a parser."""
    importlib.import_module(f"recsys_topk.bench.{SUITES[suite][0]}").add_arguments(parser)


def measure(suite: str, options: Mapping[str, Any]) -> BenchResult:
    """Run a suite; options that are not given have their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(suite, parser)
    given = argparse.Namespace(**{**vars(parser.parse_args([])), **options, "suite": suite})
    result: BenchResult = importlib.import_module(f"recsys_topk.bench.{SUITES[suite][0]}").run(given)
    return result
