"""`recsys-topk bench data`: batches, negatives, preparation and simulation, compared with a research-style reader."""

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
from torch.utils.data import default_collate

from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.timing import Pass, elapsed, in_own_process, peak_growth, peak_memory, threads
from recsys_topk.datamodules import NegativeSource, WorldConfig, expand, simulate
from recsys_topk.datamodules.recflow import LAYOUTS, BatchMaker, DayCache, DayShard, PreparedDay, RecFlowFiles
from recsys_topk.reference.research_reader import ResearchDataset, sample_negatives

LISTS: Final = 1024
SOURCES: Final[tuple[NegativeSource, ...]] = ("in_batch", "uniform")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--users", type=int, default=2000, help="users of the simulated world")
    parser.add_argument("--items", type=int, default=20_000, help="its items")
    parser.add_argument("--days", type=int, default=12, help="its days")
    parser.add_argument("--requests", type=int, default=2500, help=f"its requests per day, at least {LISTS}")
    parser.add_argument("--repeats", type=int, default=11, help="measurements of which the median is taken")
    parser.add_argument("--research-repeats", type=int, default=3, help="the same for the research reader")


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
        rows += _batches(cache, files, args)
        for days in sorted({1, (args.days + 1) // 2, args.days}):
            peak = in_own_process(measure_peak, "prepare", str(files.folder), days)
            rows.append({"part": f"prepare {days} days", "peak MB": peak})
    return BenchResult(
        suite="data",
        baseline="research-style reader (a Python loop per request) and sampler ((B, 40 B) index tensors)",
        rows=rows,
        notes=[
            f"world: {args.users} users, {args.items} items, {args.days} days of {args.requests} requests; batches of "
            f"{LISTS} two-stage requests, history 50.",
            "ms: median CPU time of one process with one thread; ratio: ours / research, in the same run.",
            "targets: 20,000 requests/s prepared, 6 ms per batch, 6 and 25 ms for negatives, under 20 extra MB.",
            "extra MB: growth of the peak resident size over one call; peak MB: the whole process.",
        ],
    )


def _batches(cache: Any, files: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure opening a day, a shuffled batch and the negatives, alternating between ours and the research reader."""
    day = files.days[-1]
    maker = BatchMaker(LAYOUTS["two-stage"], 50)
    rng = np.random.default_rng(0)
    opened, research = cache.open(day), ResearchDataset(files.folder, day)

    def make(prepared: Any, lists: int) -> Any:
        return maker.make(prepared, rng.permutation(len(prepared))[:lists])

    def read() -> Any:
        return default_collate([research[int(i)] for i in rng.permutation(len(research))[:LISTS]])

    def pair(part: str, ours: Pass, theirs: Pass, target: float | None = None) -> dict[str, Any]:
        ours()
        mine = [elapsed(ours, process_time) for _ in range(args.repeats)]
        other = 1000 * statistics.median(elapsed(theirs, process_time) for _ in range(args.research_repeats))
        mine += [elapsed(ours, process_time) for _ in range(args.repeats)]
        best = 1000 * statistics.median(mine)
        return {"part": part, "ms": best, "research ms": round(other), "ratio": best / other, "target ms": target}

    rows = [
        pair("open a day", lambda: make(cache.open(day), 1), lambda: ResearchDataset(files.folder, day)),
        pair("batch", lambda: make(opened, LISTS), read, 6.0),
    ]
    made = make(opened, LISTS)
    pool = {"catalogue": DayShard(opened, maker).catalogue(), "pool_rows": made.pool_rows}
    items = torch.cat(read()[5:9], 1)
    for number, target in ((25, 6.0), (160, 25.0)):
        growth = {
            source: in_own_process(measure_peak, source, str(cache.path(day)), number)
            for source in (*SOURCES, "research")
        }
        for source in SOURCES:
            ours = partial(expand, made.plain(), number, seed=1, group=4, source=source, **pool)
            row = pair(f"{number} negatives, {source}", ours, partial(sample_negatives, items, number), target)
            rows.append({**row, "extra MB": growth[source], "research MB": growth["research"]})
    return rows


def measure_peak(what: str, where: str, number: int) -> int:
    """Return the peak memory in MB of preparing `number` days of a folder, or its growth by drawing `number` negatives.

    Negatives (`what` is their source, or ``"research"``) are drawn for the lists of a prepared day, in the folder
    `where`.
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
    items = batch.items[batch.candidates]

    def call(lists: Any, pool: Any) -> Any:
        if what == "research":
            return sample_negatives(pool, number)
        return expand(lists, number, seed=1, group=4, source=what, catalogue=catalogue)  # type: ignore[arg-type]

    return round(peak_growth(lambda: call(small, items[:8]), lambda: call(batch, items)))
