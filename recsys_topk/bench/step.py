"""`recsys-topk bench step`: time of a training step and an evaluation batch, compared with the textbook form."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.timing import clock_of, cuda_clock, elapsed, in_own_process, peak_memory
from recsys_topk.datamodules import CascadeBatch, Schema, expand
from recsys_topk.datamodules.recflow.layout import LAYOUTS, recflow_schema
from recsys_topk.runs.libraries import keep_freed_memory, quiet_libraries

SMALL, LARGE = "train, rowwise", "train, rowwise, 1M items"
# (timed operation, negatives, items in the vocabulary, embedding optimizer)
CASES: dict[str, tuple[str, int, int, str]] = {
    "train": ("train", 0, 10_000, "same"),
    "train+25": ("train", 25, 10_000, "same"),
    "eval+160": ("eval", 160, 10_000, "same"),
    SMALL: ("train", 0, 10_000, "rowwise_adagrad"),
    LARGE: ("train", 0, 1_000_000, "rowwise_adagrad"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--batch_size", type=int, default=1024)
    parser.add_argument("--items", type=int, default=40, help="candidates per list, before negatives")
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loss", default="dftopk")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", choices=sorted(CASES), help="run one case only")


def random_schema(items: int, users: int) -> Schema:
    """Return RecFlow's schema with the given vocabulary."""
    counts = {
        "user_id": users, "device_id": users, "gender": 3, "age": 8, "province": 36, "video_id": items,
        "author_id": max(items // 5, 1), "category_level_two": 140, "category_level_one": 40, "upload_type": 40,
    }  # fmt: skip
    return recflow_schema(counts, LAYOUTS["two-stage"])


def random_batch(schema: Schema, size: int, items: int, length: int, seed: int = 0) -> CascadeBatch:
    """Return a batch like RecFlow's lists: ten items per group, popular items in many lists, full histories."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = schema.table("video_id").rows - 2
    # Popular items occur in many lists (density falls with the square root of the rank). Ten thousand items occur for
    # any vocabulary size, so that the cases differ in the size of the tables and not of the pool.
    about = torch.randperm(vocabulary, generator=generator)[:10_000]
    drawn = (torch.rand(size, items, generator=generator).pow(2) * len(about)).long()
    ids, candidates = torch.unique(about[drawn], return_inverse=True)

    def rows(kind: str, count: int) -> torch.Tensor:
        sizes = torch.tensor([schema.table(feature.table).rows for feature in getattr(schema, kind)])
        drawn = torch.rand(count, len(sizes), generator=generator).pow(2) * (sizes - 3)
        return torch.minimum(drawn.long() + 3, sizes - 1)

    features = rows("items", len(ids))
    features[:, 0] = ids + 1
    groups = torch.arange(items) * len(schema.groups) // items
    labels = torch.where(groups == 0, 29.0 - torch.arange(items), 8.0 - groups).expand(size, items)
    return CascadeBatch(
        request_id=torch.arange(size),
        request=rows("request", size),
        history=rows("history", size * length).view(size, length, -1),
        history_length=torch.full((size,), length),
        item_id=ids,
        items=features,
        candidates=candidates,
        labels=labels.contiguous(),
        mask=torch.ones(size, items, dtype=torch.bool),
        group=groups.expand(size, items).contiguous(),
    )


def run_case(options: argparse.Namespace, case: str, form: str) -> dict[str, float]:
    """Time a case of `CASES` in this process, as ``"ours"`` or ``"textbook"``; return milliseconds and megabytes."""
    torch.set_num_threads(options.threads)
    what, negatives, vocabulary, embedding_optimizer = CASES[case]
    quiet_libraries()
    if form == "ours":
        keep_freed_memory()  # as in the training commands; it slows down the textbook form, whose tensors are too large
    from recsys_topk.bench.textbook import Textbook
    from recsys_topk.cascades.module import CascadeModule
    from recsys_topk.cascades.optimizers import make_optimizer

    torch.manual_seed(0)
    schema = random_schema(vocabulary, vocabulary // 5)
    device, clock = options.device, cuda_clock if options.device == "cuda" else time.perf_counter_ns
    module = CascadeModule(schema, loss=options.loss, dim=options.dim, embedding_optimizer=embedding_optimizer)
    module.to(device)
    batch = random_batch(schema, options.batch_size, options.items, options.history).to(device)

    def expanded() -> CascadeBatch:
        group = len(schema.groups)
        return expand(batch, negatives, seed=1, group=group, source="in_batch").batch if negatives else batch

    model: torch.nn.Module = module
    current, optimizer = expanded, make_optimizer("adam", module, 1e-2, {})
    if form == "textbook":
        model = Textbook(module.cascade, schema).to(device)
        prepared = expanded()  # the sampling time is not counted for the textbook form
        current, optimizer = lambda: prepared, torch.optim.Adam(model.parameters(), lr=1e-2)

    def step() -> None:
        this = current()
        optimizer.zero_grad()
        module.objective(
            model(this), this.labels, this.mask, groups=this.group, quotas=module.cascade.quotas, k=module.k
        ).total.backward()
        optimizer.step()

    def evaluate() -> None:
        this = current()
        with torch.no_grad():
            module.update_metrics("test", model(this), this)

    action = step if what == "train" else evaluate
    action()
    times = [elapsed(action, clock) for _ in range(options.repeats)]
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_memory()
    return {"ms": statistics.median(times) / 1e6, "MB": peak}


def run(options: argparse.Namespace) -> BenchResult:
    """Time all cases one after another, each form in a separate process."""
    clock_of(options.device)  # raises if the device does not exist
    rows = []
    names = [options.case] if options.case else list(CASES)
    by_name: dict[str, float] = {}
    for name in names:
        ours = in_own_process(run_case, options, name, "ours")
        by_name[name] = ours["ms"]
        row: dict[str, Any] = {"case": name, "ms": ours["ms"], "peak MB": ours["MB"]}
        if CASES[name][3] == "same":
            theirs = in_own_process(run_case, options, name, "textbook")
            row |= {"textbook ms": theirs["ms"], "textbook MB": theirs["MB"], "speed-up": theirs["ms"] / ours["ms"]}
            row["ratio"] = ours["ms"] / theirs["ms"]
        elif name == LARGE and SMALL in by_name:
            row["ratio"] = ours["ms"] / by_name[SMALL]
        rows.append(row)
    notes = [
        f"batch {options.batch_size}, list {options.items}, history {options.history}, dim {options.dim}, "
        f"{options.threads} threads, median wall time of {options.repeats} after one warm-up; {options.loss} loss",
        "train: negatives, forward, objective, backward, optimizer; eval: negatives, forward, three recalls",
    ]
    if SMALL in by_name and LARGE in by_name:
        notes.append(f"the ratio of the last row is to the one before it: {LARGE!r} against {SMALL!r}")
    return BenchResult(
        "step", "the textbook form with Adam, timed in the same run (speed-up = its ms / ours = 1 / ratio)", rows, notes
    )
