"""`recsys-topk bench rehearsal`: prepare, train and evaluate on one simulated day as large as a day of RecFlow."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.timing import elapsed, in_own_process, peak_memory
from recsys_topk.datamodules import RecFlowDataModule, WorldConfig, simulate
from recsys_topk.datamodules.simulator.large_day import LargeDay, simulate_large_day
from recsys_topk.runs.libraries import keep_freed_memory, quiet_libraries

_WARM_UP: Final = 3
_TABLES: Final = "large day, tables of 10,000 rows"
_WORLD: Final = "world of 10,000 items"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    size = LargeDay()
    parser.add_argument("--requests", type=int, default=size.requests, help="requests of the day")
    parser.add_argument("--videos", type=int, default=size.videos, help="videos that its lists are drawn from")
    parser.add_argument("--video-ids", type=int, default=size.video_ids, help="video ids are below this")
    parser.add_argument("--authors", type=int, default=size.authors, help="author ids are below this")
    parser.add_argument("--steps", type=int, default=20, help="training steps that are measured")
    parser.add_argument("--batches", type=int, default=5, help="evaluation batches that are measured")
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=8, help="embedding dimension")
    parser.add_argument("--folder", type=Path, help="keep the files here, and reuse those of an earlier run")


def run(args: argparse.Namespace) -> BenchResult:
    """Measure each part in a separate process: CPU time of one thread, peak memory, size on disk."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        root, world = folder / "day", folder / "world"
        rows: list[dict[str, Any]] = []
        if not root.is_dir():
            day = LargeDay(requests=args.requests, videos=args.videos, video_ids=args.video_ids, authors=args.authors)
            taken = in_own_process(_measured, partial(simulate_large_day, root, day))
            rows.append({"part": "simulate", **taken, "disk MB": _size(root)})
        rows += in_own_process(_prepare, root, folder)
        rows.append(in_own_process(_train, root, folder, vars(args)))
        rows.append(in_own_process(_evaluate, root, folder, vars(args)))
        if not world.is_dir():
            simulate(world, WorldConfig(items=10_000, users=2000, days=1, requests=4 * args.batch_size))
        rows += in_own_process(_compare, root, folder, vars(args))
    return BenchResult(
        suite="rehearsal",
        baseline=f"a training step of a {_WORLD} with the same optimizer",
        rows=rows,
        notes=[
            f"day: {args.requests:,} requests, lists of 40, histories of 50; batches of {args.batch_size}, dim "
            f"{args.dim}, tables updated by row-wise Adagrad inside backward.",
            "CPU s: of the whole part, one thread. ms: median CPU time per step, batch and negatives included.",
            "same lists: ratio to the step with as many different items in a batch, and tables of 10,000 rows.",
            "GFLOP: floating-point operations of the matrix products of a step, forward and backward.",
            "peak MB: resident memory of a separate process. pass s: the median times the steps of the whole day.",
        ],
    )


def _data(root: Path, folder: Path, **options: Any) -> RecFlowDataModule:
    """Return a data module that trains, validates and tests on the only day of a data set."""
    day = "2024-01-13"
    return RecFlowDataModule(
        str(root), train_days=day, val_days=day, test_days=day, cache_dir=str(folder / "prepared"), **options
    )


def _prepare(root: Path, folder: Path) -> list[dict[str, Any]]:
    data = _data(root, folder)
    prepare = {"part": "prepare", **_measured(data.prepare_data)}
    prepare["disk MB"] = round(data.cache.open("2024-01-13").nbytes / 2**20)
    build = {"part": "vocabularies", **_measured(lambda: data.vocabularies)}
    rows = {name: table.rows for name, table in data.vocabularies.items() if table.kind == "compact"}
    build["disk MB"] = round(sum(rows.values()) * 8 / 2**20)
    return [prepare, {**build, "rows": ", ".join(f"{name} {count:,}" for name, count in rows.items())}]


def _train(root: Path, folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    data = _data(root, folder, batch_size=args["batch_size"])
    steps = _steps(data, args["dim"])
    opened = elapsed(lambda: next(steps), time.process_time)
    number = len(data.train_dataloader())
    return _whole_pass(f"train, {args['steps']} of {number} steps", steps, args["steps"], number, {"open s": opened})


def _evaluate(root: Path, folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    data = _data(root, folder, batch_size=args["batch_size"])
    model = _model(data, args["dim"])
    loader = data.test_dataloader()

    def batches() -> Iterator[None]:
        while True:
            for batch in loader:
                with torch.no_grad():
                    whole = data.add_negatives(batch)
                    model.update_metrics("test", model(whole), whole)
                yield

    part = f"evaluate, 160 negatives, {args['batches']} of {len(loader)} batches"
    return _whole_pass(part, batches(), args["batches"], len(loader), {})


def _whole_pass(part: str, steps: Iterator[None], number: int, total: int, more: dict[str, Any]) -> dict[str, Any]:
    """Return the row of some steps: their median time, and what all steps of the day would take."""
    ms = _medians({part: steps}, number)[part]
    return {"part": part, "ms": ms, **more, "pass s": round(total * ms / 1000), "peak MB": round(peak_memory())}


def _compare(root: Path, folder: Path, args: dict[str, Any]) -> list[dict[str, Any]]:
    """Time steps of the large day, of the same lists with small tables, and of a small world, alternating."""
    sources = {
        "large day": _data(root, folder, batch_size=args["batch_size"]),
        _TABLES: _data(root, folder, batch_size=args["batch_size"], vocabulary="hash:rows=10000"),
        _WORLD: _data(folder / "world", folder, batch_size=args["batch_size"]),
    }
    sources[_WORLD].prepare_data()
    pools = {name: len(next(iter(data.train_dataloader())).items) for name, data in sources.items()}
    steps = {name: _steps(data, args["dim"]) for name, data in sources.items()}
    work = {name: _products(one) for name, one in steps.items()}
    times = _medians(steps, args["steps"])
    return [
        {
            "part": f"step, {name}",
            "ms": ms,
            "ratio": ms / times[_WORLD],
            "same lists": ms / times[_TABLES] if pools[name] == pools[_TABLES] else None,
            "GFLOP": work[name],
            "GFLOP ratio": work[name] / work[_WORLD],
            "items in batch": pools[name],
        }
        for name, ms in times.items()
    ]


def _products(steps: Iterator[None]) -> float:
    """Run one step and return the floating-point operations of its matrix products, in 10^9."""
    with FlopCounterMode(display=False) as counter:
        next(steps)
    return float(counter.get_total_flops()) / 1e9


def _model(data: RecFlowDataModule, dim: int) -> Any:
    from recsys_topk.cascades.module import CascadeModule

    quiet_libraries()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return CascadeModule(data.schema, dim=dim, embedding_optimizer="rowwise_adagrad")


def _steps(data: RecFlowDataModule, dim: int) -> Iterator[None]:
    """Run training steps, epoch after epoch, one per iteration."""
    model = _model(data, dim)
    optimizer = model.configure_optimizers()
    while True:
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            model.compute_objective(data.add_negatives(batch)).total.backward()
            optimizer.step()
            yield


def _medians(steps: dict[str, Iterator[None]], number: int) -> dict[str, float]:
    """Return the median CPU time of each kind of step in ms, measured alternately after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_WARM_UP + number):
        for name, one in steps.items():
            times[name].append(1000 * elapsed(partial(next, one), time.process_time))
    return {name: statistics.median(taken[_WARM_UP:]) for name, taken in times.items()}


def _measured(call: Callable[[], Any]) -> dict[str, Any]:
    wall = time.monotonic()
    seconds = elapsed(call, time.process_time)
    return {"CPU s": seconds, "wall s": time.monotonic() - wall, "peak MB": round(peak_memory())}


def _size(folder: Path) -> int:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20)
