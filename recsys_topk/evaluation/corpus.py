"""Evaluation over a whole catalogue: recall and NDCG of a cascade over all items, and the losses of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.evaluation.baselines import Baseline, registry
from recsys_topk.evaluation.final_lists import FinalLists
from recsys_topk.evaluation.search import (
    Candidates,
    ExactSearch,
    Requests,
    Search,
    best_of,
    requests_of,
    score_candidates,
)
from recsys_topk.evaluation.training_log import TrainingLog
from recsys_topk.processes import sum_over_job
from recsys_topk.registry import suggest
from recsys_topk.tabular.schema import Schema


class CorpusEvaluation:
    """Metrics of a cascade over all items of a catalogue, updated batch by batch.

    The first stage scores every item (`search`). Each later stage scores the items that the previous stage passes on.
    `docs/metrics.md` defines the metrics. Their names are those of the sampled metrics followed by ``/corpus``:

    - ``joint_recall@k@q``: recall of the true top k among the items that survive all stages, q = the last quota;
    - ``NAME_recall@k@q``: recall of the true top k among the q = quota best items of the first stage, and of each stage
      in `alone`, which then also scores the whole catalogue;
    - ``lost_NAME``: share of the positives that reached this stage but were not passed on; ``kept``: share of the
      positives that survived all stages;
    - ``recall@K`` and ``ndcg@K`` of the final list; ``coverage``, ``gini``, ``novelty``, ``popularity_lift`` and
      ``diversity_FEATURE`` of the final list at the largest K (`FinalLists`); the metrics of the final list also for
      each baseline, e.g. ``/popularity``. ``/random`` has the expected accuracy of a random order.

    Call `open` with each catalogue, `update` with its batches, and `compute` at the end. States are sums and counts,
    so the result depends on neither the batch size nor the number of processes.

    Args:
        cascade: The stages, in evaluation mode; None = measure the baselines only.
        schema: The schema, which defines the labels.
        k: Size of the true set of the recalls at the quotas.
        cuts: K of the final list; None = the last quota, and k if it is not larger.
        alone: Names of later stages that are also measured over all items.
        baselines: Baselines by name or as objects, measured besides a random order; True = popularity if `open` gets
            training data; False = none, and no random order.
        column: Suffix after the slash in the names of the cascade's metrics.
        search: A function of (stage, items) that returns the search of the first stage; None = `ExactSearch`.
        items_at_once: Number of catalogue items that a stage without towers scores at once.
        options: Further arguments of `FinalLists`: ``slices``, ``short``, ``diversity``.
    """

    def __init__(
        self,
        cascade: Cascade | None,
        schema: Schema,
        *,
        k: int = 10,
        cuts: Sequence[int] | None = None,
        alone: Sequence[str] = (),
        baselines: bool | Sequence[str | Baseline] = True,
        column: str = "corpus",
        search: Callable[..., Search] | None = None,
        items_at_once: int = 512,
        **options: Any,
    ) -> None:
        last = max(cuts or (k,)) if cascade is None else cascade.quotas[-1]
        cuts = sorted({min(k, last), last}) if cuts is None else list(dict.fromkeys(cuts))
        if invalid := [cut for cut in cuts if not 1 <= cut <= last]:
            suffix = "" if cascade is None else f", the quota of the last stage ({cascade.names[-1]})"
            raise ValueError(
                f"K must be between 1 and {last}{suffix}, got {invalid[0]}; increase that quota for longer lists"
            )
        later = cascade.names[1:] if cascade is not None else ()
        if unknown := [name for name in alone if name not in later]:
            raise ValueError(
                f"cannot measure {unknown[0]!r} over all items; {suggest(unknown[0], later)}stages after the first: "
                f"{', '.join(later) or 'none'}"
            )
        self.cascade, self.k, self.alone, self.column = cascade, k, tuple(alone), column
        self.items_at_once = items_at_once
        self.lists = FinalLists(schema, k=k, length=last, cuts=cuts, **options)
        self.random, self._default = baselines is not False, baselines is True
        names = ("popularity",) if baselines is True else baselines or ()
        self.baselines = [registry.get(baseline) if isinstance(baseline, str) else baseline for baseline in names]
        exact = partial(ExactSearch, items_at_once=items_at_once)
        self._search, self._exact = search or exact, exact
        self._items: Catalogue | None = None
        self._first: Search | None = None
        self._others: dict[str, ExactSearch] = {}
        self._fitted: list[Baseline] = []
        self._positives = [0, 0]

    def open(self, items: Catalogue, log: TrainingLog | None = None) -> None:
        """Set the catalogue over which the following batches are evaluated, and fit the baselines.

        Args:
            items: All items, on the device of the cascade.
            log: The training data; None = there are none, and popularity is left out.
        """
        self._items = items
        self.lists.open(items, log)
        if self.cascade is not None:
            stages: dict[str, Any] = dict(self.cascade.stages.items())
            self._first = self._search(stages[self.cascade.names[0]], items)
            self._others = {name: self._exact(self.cascade.scorer(name), items) for name in self.alone}
        if log is None and self.baselines and not self._default:
            raise ValueError("baselines need training data, and the data module has none; leave out --baselines")
        self._fitted = [] if log is None else self.baselines
        if log is not None:
            for baseline in self._fitted:
                baseline.fit(log)

    @torch.no_grad()
    def update(self, batch: CascadeBatch, excluded: Tensor | None = None, earlier: Tensor | None = None) -> None:
        """Add a batch without sampled negatives.

        Args:
            batch: Requests with their lists, which contain the true items.
            excluded: (B, E) int64, catalogue rows that are not candidates (`Shard.excluded`); -1 = padding.
            earlier: (B, H) int64, rows of the user's earlier items (`Shard.earlier`).
        """
        if self._items is None:
            raise ValueError("call open(items) with the catalogue before the first batch")
        requests = requests_of(batch, self._items, excluded, earlier)
        positive = requests.mask & (requests.labels > self.lists.positive_above)
        self._positives[0] += int(positive.sum())
        self._positives[1] += int((positive & requests.own_excluded).sum())
        if self.cascade is not None:
            self._add_cascade(self.cascade, requests, positive)
        size = self._items.item_id.numel()
        for baseline in self._fitted:
            candidates = baseline.candidates(requests, self.lists.length, items=size)
            self.lists.add(baseline.name, requests, candidates)
        if self.random:
            self.lists.add_random(requests, size - (requests.excluded >= 0).sum(1))

    def _add_cascade(self, cascade: Cascade, requests: Requests, positive: Tensor) -> None:
        candidates = self.candidates(requests)
        positives, alive = positive.sum(1), positive
        for name, stage_candidates in zip(cascade.names, candidates, strict=True):
            passed = stage_candidates.holds(requests.own, requests.mask)
            lost = (alive & ~passed).sum(1)
            alive = alive & passed
            self.lists.add_mean(f"lost_{name}/{self.column}", lost / positives.clamp_min(1), positives > 0)
        self.lists.add_mean(f"kept/{self.column}", alive.sum(1) / positives.clamp_min(1), positives > 0)
        self.lists.add(self.column, requests, candidates[-1])
        alone = {cascade.names[0]: candidates[0]}
        quotas = dict(zip(cascade.names, cascade.quotas, strict=True))
        alone |= {name: search(requests, quotas[name]) for name, search in self._others.items()}
        for name, stage_candidates in alone.items():
            values = self.lists.recall(requests, stage_candidates, self.k)
            self.lists.add_mean(f"{name}_recall@{self.k}@{quotas[name]}/{self.column}", *values)

    def candidates(self, requests: Requests) -> list[Candidates]:
        """Return the candidates that each stage passes on."""
        assert self._items is not None
        assert self._first is not None
        assert self.cascade is not None
        quotas = self.cascade.quotas
        stages: list[tuple[str, Any]] = list(self.cascade.stages.items())
        candidates = [self._first(requests, quotas[0])]
        for (name, stage), quota in zip(stages[1:], quotas[1:], strict=True):
            previous = candidates[-1]
            scores = score_candidates(stage, requests, self._items, previous, self.items_at_once)
            scores = self.cascade.add_previous(name, scores, previous.scores)
            candidates.append(best_of(previous.rows, scores, previous.labels, previous.mask, quota))
        return candidates

    def compute(self) -> dict[str, float]:
        """Return all metrics by name, over all processes."""
        return self.lists.compute()

    def counts(self) -> dict[str, int]:
        """Return the numbers of counted and skipped requests and of positives, over all processes.

        ``positives_had_before`` are positives that `Shard.excluded` also contains. They remain candidates.
        """
        device = None if self._items is None else self._items.item_id.device
        totals = sum_over_job(torch.tensor(self._positives, device=device))
        counted = self.lists.counted()
        slices = {f"requests_{name}": counted[name] for name in self.lists.slices}
        all_requests = {name: counted[name] for name in ("requests", "requests_without_positives")}
        positives = dict(zip(("positives", "positives_had_before"), totals.tolist(), strict=True))
        return {**all_requests, **positives, **slices}
