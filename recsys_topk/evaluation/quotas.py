"""Joint recall over the whole catalogue as a function of the quotas, with the measured cost of each stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.datamodules.base import CascadeDataModule, Split
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.evaluation.search import Candidates, ExactSearch, candidate_order, requests_of, score_candidates
from recsys_topk.metrics.functional import recall_of
from recsys_topk.registry import suggest

# Pairs of request and item that a stage without towers scores at once.
PAIRS_AT_ONCE = 1 << 17
LARGEST = 1000


@dataclass(frozen=True)
class QuotaPoint:
    """The result of one choice of quotas.

    Attributes:
        quotas: The quota of each stage.
        recall: Joint recall over the whole catalogue.
        cost: Microseconds per request.
        on_front: Whether no other choice has a lower cost and at least this recall, or this cost and a higher recall.
    """

    quotas: tuple[int, ...]
    recall: float
    cost: float
    on_front: bool = False


@dataclass(frozen=True)
class QuotaStudy:
    """Joint recall and cost of all choices of quotas.

    Attributes:
        stages: Names of the stages.
        current: The quotas of the cascade.
        k: Size of the true set.
        items: Number of items that the first stage scores per request.
        requests: Number of requests with a positive.
        item_costs: Microseconds per request and item of each stage.
        points: All choices, by ascending cost.
    """

    stages: tuple[str, ...]
    current: tuple[int, ...]
    k: int
    items: int
    requests: int
    item_costs: tuple[float, ...]
    points: tuple[QuotaPoint, ...]


def study_quotas(
    model: CascadeModule,
    data: CascadeDataModule,
    split: Split = "val",
    *,
    grid: Mapping[str, Sequence[int]] | None = None,
    requests: int | None = None,
) -> QuotaStudy:
    """Measure all choices of quotas in one pass: every stage scores the largest number of items that it may get.

    A request costs items x c_1 + q_1 x c_2 + q_2 x c_3 + ..., where c_m is the measured time of stage m per item, in
    batches of the evaluation batch size and with torch's number of threads. The time of the first stage includes the
    selection. With several shards, each request uses the catalogue of its shard.

    Args:
        model: The model.
        data: The data module, prepared.
        split: ``"val"`` or ``"test"``. Quotas are chosen, so ``"val"`` is the default.
        grid: The quotas to try, by stage. By default the last of several stages keeps its quota. The others have their
            quota, and the last quota times 1, 2, 4, ..., up to 1,000 or all items.
        requests: Approximate number of requests to measure; None = all.
    """
    loader = data.loader(data.splits[split], training=False)
    batches = None if requests is None else -(-requests // loader.batch_size)
    measured = _Measurement(model, grid or {}, max(1, PAIRS_AT_ONCE // loader.batch_size))
    was_training, opened = model.training, None
    model.eval()
    try:
        with torch.no_grad():
            for batch in itertools.islice(loader, batches):
                batch = batch.to(model.device)
                if batch.shard != opened:
                    measured.open(data.catalogue(batch.shard, model.device), batch.plain())
                    opened = batch.shard
                measured.update(batch.plain(), batch.excluded)
    finally:
        model.train(was_training)
    return measured.study()


class _Measurement:
    """Sums of recalls by choice of quotas, and of the time of each stage."""

    def __init__(self, model: CascadeModule, grid: Mapping[str, Sequence[int]], at_once: int) -> None:
        self.model, self.cascade, self.at_once = model, model.cascade, at_once
        self.names = model.cascade.names
        if unknown := next((name for name in grid if name not in self.names), None):
            close = suggest(unknown, self.names)
            raise ValueError(f"no stage {unknown!r}; {close}the stages are {', '.join(self.names)}")
        self.options, self.grid = grid, _grid(self.names, model.cascade.quotas, grid, LARGEST)
        self.recalls: dict[tuple[int, ...], float] = {}
        self.counted = self.requests = 0
        self.seconds, self.pairs = [0.0] * len(self.names), [0] * len(self.names)

    def open(self, items: Catalogue, batch: CascadeBatch) -> None:
        if not self.recalls:
            largest = min(LARGEST, items.item_id.numel())
            self.grid = _grid(self.names, self.cascade.quotas, self.options, largest)
        self.items = items
        self.search = ExactSearch(self.cascade.scorer(self.names[0]), items, items_at_once=self.at_once)
        if self.search.stage.towers is not None:
            self.search.vectors(batch)  # encoded once per catalogue, so not timed

    def update(self, batch: CascadeBatch, excluded: Tensor | None) -> None:
        requests = requests_of(batch, self.items, excluded)
        started = time.perf_counter()
        candidates = self.search(requests, max(self.grid[0]))
        self._time(0, started, batch.size * self.items.item_id.numel())
        scores, orders = candidates.scores, []
        for place, name in enumerate(self.names[1:], start=1):
            stage: Any = self.cascade.stages[name]
            started = time.perf_counter()
            stage_scores = score_candidates(stage, requests, self.items, candidates, self.at_once)
            self._time(place, started, candidates.rows.numel())
            scores = self.cascade.add_previous(name, stage_scores, scores)
            orders.append(candidate_order(candidates.rows, scores, candidates.labels, candidates.mask))
        column, present = _columns(candidates, requests.own, requests.mask)
        above = self.model.schema.positive_above
        for choice, alive in _survivors(candidates.mask, orders, self.grid):
            selected = present & alive.gather(1, column)
            recall, _ = recall_of(selected, requests.labels, requests.mask, k=self.model.k, positive_above=above)
            self.recalls[choice] = self.recalls.get(choice, 0.0) + float(recall.sum())
        self.counted += int((requests.mask & (requests.labels > above)).any(1).sum())
        self.requests += batch.size

    def _time(self, place: int, started: float, pairs: int) -> None:
        self.seconds[place] += time.perf_counter() - started
        self.pairs[place] += pairs

    def study(self) -> QuotaStudy:
        if not self.counted:
            raise ValueError("no request has a positive, so there is no recall to measure; use another --split")
        costs = [1e6 * spent / count for spent, count in zip(self.seconds, self.pairs, strict=True)]
        size = self.pairs[0] / self.requests
        points = [
            QuotaPoint(
                choice,
                total / self.counted,
                sum(c * min(n, size) for c, n in zip(costs, (size, *choice), strict=False)),
            )
            for choice, total in self.recalls.items()
        ]
        return QuotaStudy(
            stages=tuple(self.names),
            current=tuple(self.cascade.quotas),
            k=self.model.k,
            items=round(size),
            requests=self.counted,
            item_costs=tuple(costs),
            points=mark_front(points),
        )


def mark_front(points: Sequence[QuotaPoint]) -> tuple[QuotaPoint, ...]:
    """Return points by ascending cost, with those on the Pareto front of cost and recall marked.

    Example:
        >>> points = [QuotaPoint((20,), 0.5, 2.0), QuotaPoint((10,), 0.4, 1.0), QuotaPoint((30,), 0.5, 3.0)]
        >>> [(point.quotas, point.on_front) for point in mark_front(points)]
        [((10,), True), ((20,), True), ((30,), False)]
    """
    best, marked = float("-inf"), []
    for point in sorted(points, key=lambda p: (p.cost, -p.recall, p.quotas)):
        marked.append(QuotaPoint(point.quotas, point.recall, point.cost, point.recall > best))
        best = max(best, point.recall)
    return tuple(marked)


def _grid(
    names: Sequence[str], current: Sequence[int], grid: Mapping[str, Sequence[int]], largest: int
) -> list[list[int]]:
    """Return the quotas to try for each stage, ascending; `largest` limits the default ones."""
    stage_quotas = []
    for name, quota in zip(names, current, strict=True):
        doubled = itertools.takewhile(lambda n: n <= largest, (current[-1] << step for step in itertools.count()))
        chosen = grid.get(name) or ([quota] if name == names[-1] != names[0] else [quota, *doubled])
        if min(chosen) < 1:
            raise ValueError(f"a quota must be at least 1, got {min(chosen)} for stage {name!r}")
        stage_quotas.append(sorted(set(chosen)))
    return stage_quotas


def _columns(candidates: Candidates, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column of each item of the lists among the candidates, (B, N), and whether it is there."""
    ordered, order = torch.where(candidates.mask, candidates.rows, -1).sort(1)
    position = torch.searchsorted(ordered, rows.contiguous()).clamp_max(ordered.shape[1] - 1)
    return order.gather(1, position), mask & (ordered.gather(1, position) == rows)


def _survivors(
    mask: Tensor, orders: Sequence[Tensor], quotas: Sequence[Sequence[int]], before: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield each choice of quotas in which none exceeds the one before it, and the survivors, boolean (B, m)."""
    place = len(before)
    for quota in quotas[place]:
        if before and quota > before[-1]:
            continue
        if not place:  # candidates are ordered by the score of the first stage
            alive = mask & (mask.cumsum(1) <= quota)
        else:
            ranked = mask.gather(1, orders[place - 1])
            kept = ranked & (ranked.cumsum(1) <= quota)
            alive = torch.zeros_like(mask).scatter_(1, orders[place - 1], kept)
        choice = (*before, quota)
        if place + 1 == len(quotas):
            yield choice, alive
        else:
            yield from _survivors(alive, orders, quotas, choice)
