"""The runner of the operator and loss suites: every method at every shape, compared with plain cross-entropy."""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.subjects import (
    DATA,
    TARGET_SHAPE,
    TARGETS,
    Batch,
    baseline,
    one_pass,
    subjects,
    takes_weights,
    too_big,
)
from recsys_topk.bench.timing import (
    Shape,
    clock_of,
    cpu_clock,
    growth_exponent,
    in_own_process,
    interleaved,
    peak_growth,
    threads,
)
from recsys_topk.registry import suggest

SHAPES = [
    *(Shape(1, n, n // 2) for n in (5, 10, 50, 100, 500, 1000)),
    Shape(1024, 40, 10),
    Shape(1024, 200, 10),
    Shape(64, 10_000, 100),
    Shape(1, 1_000_000, 1000),
]
QUICK = [Shape(1, 100, 50), Shape(1024, 40, 10), Shape(1024, 200, 10)]
METHOD = {
    "cpu": "ms and ratio: medians of CPU time on one thread, alternating between method and baseline. 2-thread ms: "
    "median of wall time on two threads. memory MB: growth of the peak resident memory of a new process.",
    "cuda": "Times: medians of wall time with synchronisation, alternating between method and baseline.",
}
GROWTH = [1_000, 10_000, 100_000, 1_000_000]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the operator and loss suites."""
    parser.add_argument("--names", nargs="+", metavar="NAME", help="methods to time (default: all)")
    parser.add_argument("--shapes", nargs="+", metavar="LISTSxITEMSxK", type=Shape.parse, help="e.g. 1024x200x10")
    parser.add_argument("--data", nargs="+", choices=DATA, default=["binary"], help="kinds of labels and scores")
    parser.add_argument("--quick", action="store_true", help="three shapes, short runs, without memory and growth")
    model = "compute the scores with a small two-tower and time it too, as the paper does; without memory and growth"
    parser.add_argument("--model", action="store_true", help=model)
    parser.add_argument("--seconds", type=float, default=None, help="seconds per measurement (1.0; 0.3 with --quick)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def run(args: argparse.Namespace) -> BenchResult:
    """Time every selected method at every selected shape."""
    suite, clock = args.suite, clock_of(args.device)
    shapes = [Shape.parse(str(shape)) for shape in args.shapes or ()]
    known = subjects(suite)
    labels = args.names or list(known)
    for label in labels:
        if label not in known:
            raise ValueError(f"unknown name {label!r}; {suggest(label, known)}known: {', '.join(known)}")
    seconds = args.seconds if args.seconds is not None else (0.3 if args.quick else 1.0)
    rows: list[dict[str, Any]] = []
    notes = [METHOD[args.device]]
    with threads(1):
        for shape, data in itertools.product(shapes or (QUICK if args.quick else SHAPES), args.data):
            batch = Batch.of(shape, args.device, data, args.model)
            for label in labels:
                reason = too_big(suite, known[label], shape)
                if reason is not None:
                    notes.append(f"skipped: {label} at {shape} ({reason})")
                    continue
                if batch.items is not None and not (suite == "losses" and takes_weights(known[label])):
                    continue
                rows.append(_row(label, shape, one_pass(suite, known[label], shape, batch), batch, seconds, clock))
                rows[-1]["name"] += "" if data == "binary" else f"-{data}"
                if not (args.quick or args.model):
                    rows[-1]["memory MB"] = _memory(suite, label, shape, args.device, batch, data)
        if suite == "losses" and not args.model:
            _add_targets(rows)
        if not (args.quick or args.model or args.shapes) and args.device == "cpu" and "dftopk" in labels:
            notes.append(_growth(suite, seconds))
    if args.model:
        notes.append("all times include drawing the input and the forward and backward of a small two-tower")
    return BenchResult(suite, "F.binary_cross_entropy_with_logits, forward and backward, same scores", rows, notes)


def _row(label: str, shape: Shape, method: Any, batch: Batch, seconds: float, clock: Any) -> dict[str, Any]:
    plain = baseline(batch, label)
    ours, base = interleaved(method, plain, seconds, clock)
    row: dict[str, Any] = {"name": label, "shape": str(shape), "ratio": ours / base, "ms": ours, "baseline ms": base}
    if clock is cpu_clock:
        with threads(2):
            row["2-thread ms"], _ = interleaved(method, plain, seconds / 3, time.perf_counter_ns)
    return row


def _add_targets(rows: list[dict[str, Any]]) -> None:
    """Add the largest ratio that a loss should have, where there is one."""
    ratios = {row["name"]: row["ratio"] for row in rows if row["shape"] == TARGET_SHAPE}
    for row in (row for row in rows if row["shape"] == TARGET_SHAPE):
        plain = ratios.get(row["name"].removesuffix("-weights")) if row["name"].endswith("-weights") else None
        row["target"] = TARGETS.get(row["name"]) if plain is None else 1.2 * plain


def _memory(suite: str, label: str, shape: Shape, device: str, batch: Batch, data: str) -> float | None:
    if device == "cpu":
        try:
            return in_own_process(growth_of, suite, label, shape, data)
        except BrokenProcessPool:
            return None  # the system killed the process for lack of memory
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_pass(suite, subjects(suite)[label], shape, batch)()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def growth_of(suite: str, label: str, shape: Shape, data: str = "binary") -> float:
    """Return the growth in MB of the peak resident memory of this process by one pass of a method."""
    torch.set_num_threads(1)
    subject, small = subjects(suite)[label], Shape(2, 8, 3)
    batch = Batch.of(shape, "cpu", data)

    def warm_up() -> None:
        one_pass(suite, subject, small, Batch.of(small, "cpu"))()
        baseline(batch)()  # every loss needs its gradient buffer

    return round(peak_growth(warm_up, one_pass(suite, subject, shape, batch)), 1)


def _growth(suite: str, seconds: float) -> str:
    """Return a sentence with the growth exponents of dftopk and of the baseline."""
    times, subject = [], subjects(suite)["dftopk"]
    for shape in (Shape(1, n, n // 100) for n in GROWTH):
        batch = Batch.of(shape, "cpu")
        times.append(interleaved(one_pass(suite, subject, shape, batch), baseline(batch), seconds, cpu_clock))
    all_sizes, large = (
        [growth_exponent(GROWTH[first:], list(line)[first:]) for line in zip(*times, strict=True)] for first in (0, 2)
    )
    return (
        f"growth: dftopk takes N^{all_sizes[0]:.2f} for one list of N = 10^3 to 10^6, k = N/100 "
        f"(plain cross-entropy N^{all_sizes[1]:.2f}); from 10^5 to 10^6 N^{large[0]:.2f} (N^{large[1]:.2f})"
    )
