"""`recsys-topk bench data`: batches, negatives, preparation and simulation, on one thread."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, Final

import numpy as np
import torch

from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.timing import Pass, elapsed, in_own_process, peak_growth, peak_memory, threads
from recsys_topk.datamodules import NegativeSource, WorldConfig, expand, simulate
from recsys_topk.datamodules.recflow import LAYOUTS, BatchMaker, DayCache, DayShard, PreparedDay, RecFlowFiles

LISTS: Final = 1024
SOURCES: Final[tuple[NegativeSource, ...]] = ("in_batch", "uniform")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--users", type=int, default=2000, help="users of the simulated world")
    parser.add_argument("--items", type=int, default=20_000, help="its items")
    parser.add_argument("--days", type=int, default=12, help="its days")
    parser.add_argument("--requests", type=int, default=2500, help=f"its requests per day, at least {LISTS}")
    parser.add_argument("--repeats", type=int, default=11, help="measurements of which the median is taken")


def run(args: argparse.Namespace) -> BenchResult:
    """Measure everything on one simulated world: median CPU time of one process with one thread."""
    if args.requests < LISTS:
        raise ValueError(f"--requests must be at least {LISTS}, the size of the batches measured; got {args.requests}")
    with threads(1), tempfile.TemporaryDirectory() as scratch:
        config = WorldConfig(users=args.users, items=args.items, days=args.days, requests=args.requests)
        seconds = elapsed(lambda: simulate(Path(scratch) / "world", config), process_time)
        total = args.days * args.requests
        rows: list[dict[str, Any]] = [{"part": "simulate", "requests/s": round(total / seconds)}]
        files = RecFlowFiles(Path(scratch) / "world")
        cache = DayCache(files, Path(scratch) / "cache")
        cache.prepare(files.days[:1])
        seconds = elapsed(lambda: cache.prepare(files.days[1:]), process_time)
        rows.append({"part": "prepare", "requests/s": round((total - args.requests) / seconds)})
        rows += _batches(cache, files, args.repeats)
        for days in sorted({1, (args.days + 1) // 2, args.days}):
            peak = in_own_process(measure_peak, "prepare", str(files.folder), days)
            rows.append({"part": f"prepare {days} days", "peak MB": peak})
    return BenchResult(
        suite="data",
        baseline="a copy of the tensors of a batch",
        rows=rows,
        notes=[
            f"world: {args.users} users, {args.items} items, {args.days} days of {args.requests} requests; batches of "
            f"{LISTS} two-stage requests, history 50.",
            "ms: median CPU time of one process with one thread; ratio: to the copy, alternating.",
            "targets: 20,000 requests/s prepared, 6 ms per batch, 6 and 25 ms for negatives, under 20 extra MB.",
            "extra MB: growth of the peak resident size over one call; peak MB: the whole process.",
        ],
    )


def _batches(cache: Any, files: Any, repeats: int) -> list[dict[str, Any]]:
    """Measure opening a day, a shuffled batch and the negatives, alternating with a copy of the batch."""
    day = files.days[-1]
    maker = BatchMaker(LAYOUTS["two-stage"], 50)
    rng = np.random.default_rng(0)
    opened = cache.open(day)

    def make(prepared: Any, lists: int) -> Any:
        return maker.make(prepared, rng.permutation(len(prepared))[:lists])

    made = make(opened, LISTS)
    tensors = [value for value in vars(made.plain()).values() if isinstance(value, torch.Tensor)]
    copy: Pass = lambda: [value.clone() for value in tensors]  # noqa: E731

    def row(part: str, call: Pass, target: float | None = None) -> dict[str, Any]:
        call()
        times = [[elapsed(one, process_time) for one in (call, copy)] for _ in range(repeats)]
        ours, base = (1000 * statistics.median(taken) for taken in zip(*times, strict=True))
        return {"part": part, "ms": ours, "ratio": ours / base, "target ms": target}

    rows = [row("open a day", lambda: make(cache.open(day), 1)), row("batch", lambda: make(opened, LISTS), 6.0)]
    pool = {"catalogue": DayShard(opened, maker).catalogue(), "pool_rows": made.pool_rows}
    for number, target in ((25, 6.0), (160, 25.0)):
        for source in SOURCES:
            growth = in_own_process(measure_peak, source, str(cache.path(day)), number)
            drawn = partial(expand, made.plain(), number, seed=1, group=4, source=source, **pool)
            rows.append({**row(f"{number} negatives, {source}", drawn, target), "extra MB": growth})
    return rows


def measure_peak(what: str, where: str, number: int) -> int:
    """Return the peak memory in MB of preparing `number` days of a folder, or its growth by drawing `number` negatives.

    Negatives (`what` is their source) are drawn for the lists of a prepared day, in the folder `where`.
    """
    if what == "prepare":
        files = RecFlowFiles(where)
        with tempfile.TemporaryDirectory() as scratch:
            DayCache(files, scratch).prepare(files.days[:number])
        return round(peak_memory())
    torch.set_num_threads(1)
    folder = Path(where)
    day = PreparedDay(folder, folder.name[:10])
    maker = BatchMaker(LAYOUTS["two-stage"], 50)
    small, batch = maker.make(day, np.arange(8)).plain(), maker.make(day, np.arange(LISTS)).plain()
    catalogue = DayShard(day, maker).catalogue()

    def call(lists: Any) -> Any:
        return expand(lists, number, seed=1, group=4, source=what, catalogue=catalogue)  # type: ignore[arg-type]

    return round(peak_growth(lambda: call(small), lambda: call(batch)))
