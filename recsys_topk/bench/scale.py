"""`recsys-topk bench scale`: time, communication and memory of training with sharded tables on several processes."""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.step import random_batch, random_schema
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.tables import tables_on_meta
from recsys_topk.runs.libraries import quiet_libraries
from recsys_topk.strategies.torchrec import TorchRecStrategy

WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes (default 1 2)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the largest table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=512, help="requests per batch of all processes together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sharding", default="row_wise", choices=("auto", "table_wise", "row_wise", "column_wise"))


def run(options: argparse.Namespace) -> BenchResult:
    """Measure each number of processes in new processes."""
    rows: list[dict[str, Any]] = []
    for number in options.processes:
        if number < 1 or options.batch_size % number:
            raise ValueError(f"--batch_size {options.batch_size} must be a multiple of --processes {number}")
        found = _measure(number, options)
        first = rows[0]["ms per step"] if rows else found["ms per step"]
        rows.append({"processes": str(number), **found, "ratio": found["ms per step"] / first})
    notes = [
        f"tables: {options.rows:,} rows of dimension {options.dim} and smaller ones, two stages, {options.sharding}, "
        f"row-wise Adagrad; {options.batch_size} requests per batch of all processes, one thread each, gloo.",
        "communication = share of the time during which a collective is under way, waiting for others included; "
        "table MB = local shards, RSS MB = growth of the process; both the largest of any process.",
    ]
    return BenchResult("scale", f"a step of {options.processes[0]} process(es)", rows, notes)


def _measure(number: int, options: argparse.Namespace) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(
        1, 1, number, run_id="bench", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=0
    )
    found = list(elastic_launch(config, _work)(vars(options)).values())
    return {
        "requests/s": round(options.batch_size / max(one["seconds"] for one in found)),
        "ms per step": 1e3 * max(one["seconds"] for one in found),
        "communication": f"{sum(one['communication'] for one in found) / number:.0%}",
        "table MB": max(one["tables"] for one in found) / 1e6,
        "RSS MB": max(one["rss"] for one in found) / 1e6,
    }


def _work(options: dict[str, Any]) -> dict[str, float]:
    """Train in one of several processes; return the seconds of a step, the share of communication and the bytes."""
    rank, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    quiet_libraries()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    schema = random_schema(options["rows"], 10_000)
    batches = [random_batch(schema, options["batch_size"] // number, 40, 20, seed=100 * rank + i) for i in range(4)]
    before = _rss()
    torch.manual_seed(0)
    with tables_on_meta():
        module = CascadeModule(schema, dim=options["dim"], embedding_optimizer="rowwise_adagrad", validate=False)
    clock = _Clock(options["steps"])
    trainer = pl.Trainer(
        accelerator="cpu", devices=number, strategy=TorchRecStrategy(sharding=options["sharding"]), callbacks=[clock],
        max_steps=WARM_UP + 2 * options["steps"], max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    shards = [value for value in module.state_dict().values() if isinstance(value, ShardedTensor)]
    tables = sum(shard.tensor.numel() * 4 for value in shards for shard in value.local_shards())
    return {"seconds": clock.seconds, "communication": clock.share, "tables": tables, "rss": _rss() - before}


class _Clock(Callback):  # type: ignore[misc]  # lightning is untyped here
    """Times some steps, then profiles the same number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seconds, self.share = steps, 0.0, 0.0
        self._start = 0.0
        self._profile: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the clock or the profiler."""
        if trainer.global_step == WARM_UP:
            self._start = time.perf_counter()
        elif trainer.global_step == WARM_UP + self.steps:
            self.seconds = (time.perf_counter() - self._start) / self.steps
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.__enter__()
            self._start = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        """Read the profile."""
        passed = time.perf_counter() - self._start
        self._profile.__exit__(None, None, None)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.name.startswith(("gloo:", "nccl:"))
        )
        under_way, last = 0.0, float("-inf")
        for start, end in spans:
            under_way += max(0.0, end - max(start, last))
            last = max(last, end)
        self.share = under_way / 1e6 / passed


def _rss() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
