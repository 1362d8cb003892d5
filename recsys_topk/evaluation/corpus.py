"""Evaluation over a whole catalogue: recall and NDCG of a cascade over all items, and the losses of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.evaluation.catalogue_baselines import popular_items, random_ndcg, random_recall
from recsys_topk.evaluation.search import (
    Candidates,
    ExactSearch,
    Items,
    Search,
    SearchRequests,
    best_of,
    requests_of,
    score_candidates,
)
from recsys_topk.metrics.functional import recall_of
from recsys_topk.metrics.mean import ListMean
from recsys_topk.ops.losses.dcg import Gain, gains, ideal_dcg, rank_discounts
from recsys_topk.registry import suggest
from recsys_topk.tabular.schema import Schema


class RequestMean(ListMean):
    """Mean over requests of values computed elsewhere.

    Example:
        >>> mean = RequestMean()
        >>> mean.update(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
        >>> mean.compute(), mean.skipped
        (tensor(1.), tensor(1))
    """

    def update(self, values: Tensor, counted: Tensor) -> None:
        """Add one value per request, (B,), and which requests are counted, boolean (B,)."""
        self.add(values.double(), counted)


class CorpusEvaluation:
    """Metrics of a cascade over all items of a catalogue, updated batch by batch.

    The first stage scores every item (`search`). Each later stage scores the items that the previous stage passes on.
    `docs/metrics.md` defines the metrics. Their names are those of the sampled metrics followed by ``/corpus``:

    - ``joint_recall@k@q``: recall of the true top k among the items that survive all stages, q = the last quota;
    - ``NAME_recall@k@q``: recall of the true top k among the q = quota best items of the first stage, and of each stage
      in `alone`, which then also scores the whole catalogue;
    - ``lost_NAME``: share of the positives that reached this stage but were not passed on; ``kept``: share of the
      positives that survived all stages;
    - ``recall@K`` and ``ndcg@K`` of the final list, also for the baselines ``/popularity`` and ``/random``.

    Call `open` with each catalogue, `update` with its batches, and `compute` at the end. States are sums and counts,
    so the result depends on neither the batch size nor the number of processes.

    Args:
        cascade: The stages, in evaluation mode.
        schema: The schema, which defines the labels.
        k: Size of the true set of the recalls at the quotas.
        cuts: K of the final list; None = the last quota, and k if it is not larger.
        alone: Names of later stages that are also measured over all items.
        baselines: Whether to measure a random order, and popularity if `open` gets counts.
        column: Suffix after the slash in the names of the cascade's metrics.
        search: A function of (stage, items) that returns the search of the first stage; None = `ExactSearch`.
        items_at_once: Number of catalogue items that a stage without towers scores at once.
    """

    def __init__(
        self,
        cascade: Cascade,
        schema: Schema,
        *,
        k: int = 10,
        cuts: Sequence[int] | None = None,
        alone: Sequence[str] = (),
        baselines: bool = True,
        column: str = "corpus",
        search: Callable[..., Search] | None = None,
        items_at_once: int = 512,
    ) -> None:
        last = cascade.quotas[-1]
        self.cuts = tuple(sorted({min(k, last), last})) if cuts is None else tuple(dict.fromkeys(cuts))
        if wrong := [cut for cut in self.cuts if not 1 <= cut <= last]:
            raise ValueError(
                f"K must be between 1 and {last}, the quota of the last stage ({cascade.names[-1]}), got {wrong[0]}; "
                f"increase that quota for longer lists"
            )
        later = cascade.names[1:]
        if unknown := [name for name in alone if name not in later]:
            raise ValueError(
                f"cannot measure {unknown[0]!r} over all items; {suggest(unknown[0], later)}stages after the first: "
                f"{', '.join(later) or 'none'}"
            )
        self.cascade, self.k, self.alone, self.column = cascade, k, tuple(alone), column
        self.baselines, self.items_at_once = baselines, items_at_once
        self.positive_above = schema.positive_above
        self.gain: Gain = "linear" if schema.labels == "places" else "exponential"
        exact = partial(ExactSearch, items_at_once=items_at_once)
        self._search, self._exact = search or exact, exact
        self._items: Items | None = None
        self._popular: Tensor | None = None
        self._counts: Tensor | None = None
        self._first: Search | None = None
        self._others: dict[str, ExactSearch] = {}
        self.metrics: dict[str, RequestMean] = {}
        self._positives = [0, 0]

    def open(self, items: Items, counts: Tensor | None = None) -> None:
        """Set the catalogue over which the following batches are evaluated.

        Args:
            items: All items, on the device of the cascade.
            counts: (C,), how often each item was a positive in training; None = no popularity baseline.
        """
        stages: dict[str, Any] = dict(self.cascade.stages.items())
        self._items = items
        self._first = self._search(stages[self.cascade.names[0]], items)
        self._others = {name: self._exact(self.cascade.scorer(name), items) for name in self.alone}
        self._counts = counts
        self._popular = None if counts is None else counts.sort(descending=True, stable=True).indices

    @torch.no_grad()
    def update(self, batch: CascadeBatch, excluded: Tensor | None = None) -> None:
        """Add a batch without sampled negatives.

        Args:
            batch: Requests with their lists, which contain the true items.
            excluded: (B, E) int64, catalogue rows that are not candidates (`Shard.excluded`); -1 = padding.
        """
        if self._items is None:
            raise ValueError("call open(items) with the catalogue before the first batch")
        requests = requests_of(batch, self._items, excluded)
        stages = self.candidates(requests)
        positive = requests.mask & (requests.labels > self.positive_above)
        self._positives[0] += int(positive.sum())
        self._positives[1] += int((positive & requests.own_excluded).sum())
        number, alive = positive.sum(1), positive
        for name, found in zip(self.cascade.names, stages, strict=True):
            passed = found.holds(requests.own, requests.mask)
            lost = (alive & ~passed).sum(1)
            alive = alive & passed
            self._add(f"lost_{name}/{self.column}", lost / number.clamp_min(1), number > 0)
        self._add(f"kept/{self.column}", alive.sum(1) / number.clamp_min(1), number > 0)
        self._measure_final(self.column, requests, stages[-1])
        alone = {self.cascade.names[0]: stages[0]}
        quotas = dict(zip(self.cascade.names, self.cascade.quotas, strict=True))
        alone |= {name: search(requests, quotas[name]) for name, search in self._others.items()}
        for name, found in alone.items():
            self._add(f"{name}_recall@{self.k}@{quotas[name]}/{self.column}", *self._recall(requests, found, self.k))
        if self.baselines:
            self._add_baselines(requests)

    def candidates(self, requests: SearchRequests) -> list[Candidates]:
        """Return the candidates that each stage passes on."""
        assert self._items is not None
        assert self._first is not None
        quotas = self.cascade.quotas
        stages: list[tuple[str, Any]] = list(self.cascade.stages.items())
        found = [self._first(requests, quotas[0])]
        for (name, stage), quota in zip(stages[1:], quotas[1:], strict=True):
            before = found[-1]
            scores = score_candidates(stage, requests, self._items, before, self.items_at_once)
            scores = self.cascade.add_previous(name, scores, before.scores)
            found.append(best_of(before.rows, scores, before.labels, before.mask, quota))
        return found

    def compute(self) -> dict[str, float]:
        """Return all metrics by name, over all processes."""
        return {name: float(metric.compute()) for name, metric in self.metrics.items()}

    def counts(self) -> dict[str, int]:
        """Return the numbers of counted and skipped requests and of positives, over all processes.

        ``positives_had_before`` are positives that `Shard.excluded` also contains. They remain candidates.
        """
        names = ("requests", "requests_without_positives", "positives", "positives_had_before")
        first = next(iter(self.metrics.values()), RequestMean())
        found = torch.stack([first.count, first.skipped, *(first.count.new_tensor(n) for n in self._positives)])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(found)
        return dict(zip(names, found.tolist(), strict=True))

    def _add(self, name: str, values: Tensor, counted: Tensor) -> None:
        if name not in self.metrics:
            self.metrics[name] = RequestMean().to(values.device)
        self.metrics[name].update(values, counted)

    def _recall(self, requests: SearchRequests, found: Candidates, k: int) -> tuple[Tensor, Tensor]:
        held = found.holds(requests.own, requests.mask)
        return recall_of(held, requests.labels, requests.mask, k=k, positive_above=self.positive_above)

    def _measure_final(self, column: str, requests: SearchRequests, found: Candidates) -> None:
        """Add the metrics of the final lists."""
        last = self.cascade.quotas[-1]
        self._add(f"joint_recall@{self.k}@{last}/{column}", *self._recall(requests, found, self.k))
        for cut in self.cuts:
            best = Candidates(*(part[:, :cut] for part in (found.rows, found.scores, found.labels, found.mask)))
            self._add(f"recall@{cut}/{column}", *self._recall(requests, best, cut))
            value = torch.where(best.mask, gains(best.labels.double(), self.gain), 0.0)
            dcg = (value * rank_discounts(value.shape[1], None, value)).sum(1)
            self._add(f"ndcg@{cut}/{column}", *self._normalised(requests, dcg, cut))

    def _normalised(self, requests: SearchRequests, dcg: Tensor, cut: int) -> tuple[Tensor, Tensor]:
        best = ideal_dcg(self._gains(requests), cut)
        positive = (requests.mask & (requests.labels > self.positive_above)).any(1)
        counted = positive & (best > 0)
        return torch.where(counted, dcg / torch.where(counted, best, 1.0), 0.0), counted

    def _gains(self, requests: SearchRequests) -> Tensor:
        return torch.where(requests.mask, gains(requests.labels.double(), self.gain), 0.0)

    def _add_baselines(self, requests: SearchRequests) -> None:
        assert self._items is not None
        last, above = self.cascade.quotas[-1], self.positive_above
        if self._popular is not None and self._counts is not None:
            found = popular_items(requests, self._popular, self._counts, last)
            self._measure_final("popularity", requests, found)
        items = self._items.item_id.numel() - (requests.excluded >= 0).sum(1)
        values, counted = random_recall(requests, items, k=self.k, m=last, positive_above=above)
        self._add(f"joint_recall@{self.k}@{last}/random", values, counted)
        for cut in self.cuts:
            self._add(f"recall@{cut}/random", *random_recall(requests, items, k=cut, m=cut, positive_above=above))
            dcg = random_ndcg(self._gains(requests), items, cut)
            self._add(f"ndcg@{cut}/random", *self._normalised(requests, dcg, cut))
