"""`recsys-topk bench paper`: the runtime protocol of the paper, which times a pass with a model and its input.

One list (batch 1), k = N / 2. A pass draws random ids, runs a two-tower over 13 tables of 100 rows and 8 columns
(history of 50 views), the loss and the backward, and clears the gradients; there is no optimizer step. The result is
the mean wall time of the last 90 of 100 passes, or of the passes that fit into `--limit`. Most of this time is not
spent in the operator; `bench operators` times the operator alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recsys_topk import losses
from recsys_topk.bench.result import BenchResult
from recsys_topk.bench.timing import clock_of, cpu_clock, cuda_clock, threads

ROWS, DIM, HISTORY = 100, 8, 50
ITEMS = (5, 10, 50, 100, 500, 1000)
OPTIONS: dict[str, dict[str, Any]] = {"diffsort": {"network": "odd_even"}}
NAMES = ("dftopk", "lapsum", "neuralsort", "softsort", "sparse", "diffsort", "sigmoid")


class SmallTwoTower(nn.Module):
    """The model in the runtime protocol of the paper: 13 tables, two towers 128 -> 64 -> 32, a dot product."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(13))
        self.user = _tower(13 * DIM)
        self.item = _tower(8 * DIM)

    def forward(self, request: Tensor, history: Tensor, items: Tensor) -> Tensor:
        """Return scores (1, N) for ids (1, 8), (1, 50, 5) and (1, N, 8)."""
        context = self._embed(request, range(8))
        views = self._embed(history, range(8, 13)).mean(1)
        users = self.user(torch.cat([context, views], -1))
        vectors = self.item(self._embed(items, (*range(8, 13), 0, 1, 2)))
        scores: Tensor = torch.bmm(vectors, users[:, :, None]).squeeze(-1)
        return scores

    def _embed(self, ids: Tensor, tables: Any) -> Tensor:
        return torch.cat([self.tables[table](ids[..., column]) for column, table in enumerate(tables)], -1)


def _tower(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    names = "losses (default: those of the paper, and sigmoid)"
    parser.add_argument("--names", nargs="+", metavar="LOSS", default=list(NAMES), help=names)
    parser.add_argument("--items", nargs="+", type=int, default=list(ITEMS), help="list lengths; k is half of each")
    parser.add_argument("--repeats", type=int, default=100, help="passes; the first tenth is not counted")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one measurement, at least 3 passes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def run(args: argparse.Namespace) -> BenchResult:
    """Time every selected loss, and plain cross-entropy, at every length."""
    clock_of(args.device)
    wrong = [name for name, least in (("items", min(args.items)), ("repeats", args.repeats)) if least < 2]
    if wrong:
        raise ValueError(f"--{wrong[0]} must be at least 2, got {getattr(args, wrong[0])}")
    classes = {name: losses.registry.resolve(name) for name in args.names}
    rows: list[dict[str, Any]] = []
    with threads(args.threads):
        for items in args.items:
            torch.manual_seed(0)
            model = SmallTwoTower().to(args.device)
            labels = torch.zeros(1, items, device=args.device)
            labels[0, torch.randperm(items)[: items // 2]] = 1.0
            base, _ = _milliseconds(model, labels, F.binary_cross_entropy_with_logits, args)
            for name, cls in classes.items():
                loss = cls(**({"k": items // 2} if cls.requires_k else {}), **OPTIONS.get(name, {}))
                ms, cpu = _milliseconds(model, labels, loss, args)
                shape = f"1x{items}x{items // 2}"
                rows.append({"name": name, "shape": shape, "ratio": ms / base, "ms": ms, "baseline ms": base})
                rows[-1] |= {"cpu ms": cpu} if args.device == "cpu" else {"device": args.device}
    notes = [
        f"ms: mean wall time per pass over the last nine tenths of {args.repeats} passes (or of those that fit into "
        f"{args.limit:g} s, at least 3), {args.threads} thread(s); it includes "
        "drawing the input, the forward and backward of the model, and the loss. cpu ms: median CPU time "
        "of the same passes, which depends less on other work on the machine."
    ]
    return BenchResult("paper", f"the same pass with plain cross-entropy, on {args.device}", rows, notes)


def _milliseconds(
    model: SmallTwoTower, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor], args: argparse.Namespace
) -> tuple[float, float]:
    """Return the mean wall time and the median CPU time of a pass."""
    clock = cuda_clock if args.device == "cuda" else time.perf_counter_ns
    times: list[int] = []
    worked: list[int] = []
    deadline = time.monotonic() + args.limit
    while len(times) < args.repeats and (len(times) < 3 or time.monotonic() < deadline):
        before, begun = clock(), cpu_clock()
        shapes = ((1, 8), (1, HISTORY, 5), (1, labels.shape[1], 8))
        ids = [torch.randint(ROWS, shape).to(args.device) for shape in shapes]
        loss(model(*ids), labels).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        times.append(clock() - before)
        worked.append(cpu_clock() - begun)
    warm = max(1, len(times) // 10)
    return statistics.fmean(times[warm:]) / 1e6, statistics.median(worked[warm:]) / 1e6
