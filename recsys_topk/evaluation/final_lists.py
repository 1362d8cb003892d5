"""Metrics of final lists over a whole catalogue: accuracy, exposure, novelty and diversity, overall and by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.evaluation.random_order import random_ndcg, random_recall
from recsys_topk.evaluation.search import Candidates, Requests
from recsys_topk.evaluation.training_log import TrainingLog
from recsys_topk.metrics.functional import (
    catalogue_coverage,
    gini,
    intra_list_diversity,
    mean_novelty,
    mean_popularity,
    recall_of,
)
from recsys_topk.metrics.mean import ListMean
from recsys_topk.ops.losses.dcg import Gain, gains, ideal_dcg, rank_discounts
from recsys_topk.processes import sum_over_job
from recsys_topk.registry import suggest
from recsys_topk.tabular.schema import Schema

SLICES: Final = ("new", "warm", "short", "long")


class RequestMean(ListMean):
    """Mean over requests of values computed elsewhere, in float64.

    Example:
        >>> mean = RequestMean()
        >>> mean.update(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
        >>> float(mean.compute()), int(mean.skipped)
        (1.0, 1)
    """

    def update(self, values: Tensor, counted: Tensor) -> None:
        """Add one value per request, (B,), and which requests are counted, boolean (B,)."""
        self.add(values.double(), counted)

    def compute(self) -> Tensor:
        """Return the mean over all counted requests, a float64 scalar."""
        return torch.as_tensor(self.total / self.count)


class FinalLists:
    """Metrics of the final lists of one or more rankers, updated batch by batch; `docs/metrics.md` defines them.

    Metrics of exposure, novelty and diversity are of the largest cut. Novelty and popularity lift need the users'
    training interactions (`Shard.sequences`). A slice counts only the positives that belong to it, and the requests
    that have one: ``new`` (items without a positive in training) and ``warm`` items, requests with ``short`` histories
    (at most `short` items) and ``long`` ones. Its metrics have the suffix ``_SLICE``.

    Memory: 8 bytes per item of the catalogue, ranker and slice.

    Args:
        schema: The schema, which defines the labels and features.
        k: Size of the true set of the joint recall.
        length: Length of the final lists.
        cuts: K of recall and NDCG.
        slices: Names of slices.
        short: Largest length of a short history.
        diversity: Names of categorical features or bags of the items, for the diversity of the lists.
        keep: Whether to keep the value of each request, for `per_request`.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        k: int,
        length: int,
        cuts: Sequence[int],
        slices: Sequence[str] = (),
        short: int = 10,
        diversity: Sequence[str] = (),
        keep: bool = False,
    ) -> None:
        self.keep = keep
        for names, known, kind in ((slices, SLICES, "slice"), (diversity, schema.id_columns("items"), "item feature")):
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"unknown {kind} {name!r}; {suggest(name, known)}available: {', '.join(known) or 'none'}"
                    )
        self.k, self.length, self.cuts, self.slices, self.short = k, length, tuple(cuts), tuple(slices), short
        self.positive_above = schema.positive_above
        self.gain: Gain = "linear" if schema.labels == "places" else "exponential"
        tables = {feature.name: schema.table(str(feature.table)) for feature in schema.items if feature.table}
        columns = schema.id_columns("items")
        # A bag is filled up with the padding id; the padding id of a categorical feature is a value.
        bags = {feature.name for feature in schema.items if feature.kind == "bag"}
        self._features = {name: (columns[name], tables[name].padding if name in bags else None) for name in diversity}
        self._means: dict[str, RequestMean] = {}
        self._lift: dict[str, tuple[RequestMean, RequestMean]] = {}
        self._exposure: dict[str, Tensor] = {}
        self._closed: list[dict[str, float]] = []
        self._items: Catalogue | None = None
        self._log: TrainingLog | None = None

    def open(self, items: Catalogue, log: TrainingLog | None) -> None:
        """Set the catalogue of the following lists, and the training data if there are any."""
        if log is None and {"new", "warm"} & set(self.slices):
            raise ValueError("the slices new and warm need training data, and the data module has none")
        self._close()
        self._items, self._log = items, log

    def add_mean(self, name: str, values: Tensor, counted: Tensor) -> None:
        """Add values of a metric, one per request, (B,), and which requests are counted, boolean (B,)."""
        if name not in self._means:
            self._means[name] = RequestMean().to(values.device)
            self._means[name].lists = [] if self.keep else None
        self._means[name].update(values, counted)

    def per_request(self, name: str) -> Tensor:
        """Return a metric of every request in the order of the data, NaN if it is not counted; needs `keep`."""
        return torch.cat(self._means[name].lists or [])

    def add(self, column: str, requests: Requests, found: Candidates) -> None:
        """Add the final lists of the ranker `column`."""
        for name, suffix in self._suffixes(column):
            slice_requests, lists = self._of_slice(name, requests, found)
            self.add_mean(f"joint_recall@{self.k}@{self.length}{suffix}", *self.recall(slice_requests, lists, self.k))
            for cut in self.cuts:
                best = _head(lists, cut)
                self.add_mean(f"recall@{cut}{suffix}", *self.recall(slice_requests, best, cut))
                value = torch.where(best.mask, gains(best.labels.double(), self.gain), 0.0)
                dcg = (value * rank_discounts(value.shape[1], None, value)).sum(1)
                self.add_mean(f"ndcg@{cut}{suffix}", *self._normalised(slice_requests, dcg, cut))
            largest = max(self.cuts)
            self._add_beyond_accuracy(f"@{largest}{suffix}", slice_requests, _head(lists, largest))

    def add_random(self, requests: Requests, candidates: Tensor) -> None:
        """Add the expected accuracy of a random order; `candidates` is their number per request, (B,)."""
        above = self.positive_above
        for name, suffix in self._suffixes("random"):
            slice_requests, _ = self._of_slice(name, requests, None)
            joint = random_recall(slice_requests, candidates, k=self.k, m=self.length, positive_above=above)
            self.add_mean(f"joint_recall@{self.k}@{self.length}{suffix}", *joint)
            for cut in self.cuts:
                values = random_recall(slice_requests, candidates, k=cut, m=cut, positive_above=above)
                self.add_mean(f"recall@{cut}{suffix}", *values)
                dcg = random_ndcg(self._gains(slice_requests), candidates, cut)
                self.add_mean(f"ndcg@{cut}{suffix}", *self._normalised(slice_requests, dcg, cut))

    def recall(self, requests: Requests, found: Candidates, k: int) -> tuple[Tensor, Tensor]:
        """Return the share of the true top k among some candidates, and which requests have a positive."""
        selected = found.holds(requests.own, requests.mask)
        return recall_of(selected, requests.labels, requests.mask, k=k, positive_above=self.positive_above)

    def compute(self) -> dict[str, float]:
        """Return all metrics by name, over all processes."""
        metrics = {name: float(mean.compute()) for name, mean in self._means.items()}
        metrics |= {name: float(lists.compute() / past.compute() - 1) for name, (lists, past) in self._lift.items()}
        catalogues = [*self._closed, self._catalogue_metrics()]
        for name in catalogues[-1]:
            metrics[name] = sum(catalogue[name] for catalogue in catalogues) / len(catalogues)
        metrics = {name: metrics[name] for name in sorted(metrics, key=self._slice_number)}
        # A slice without requests has no metrics.
        counts = [1, *(self.counted()[name] for name in self.slices)]
        return {name: value for name, value in metrics.items() if counts[self._slice_number(name)]}

    def counted(self) -> dict[str, int]:
        """Return the number of counted requests, of skipped ones, and of those of each slice, over all processes."""
        joint = f"joint_recall@{self.k}@{self.length}"
        ranker = next((name.partition("/")[2] for name in self._means if name.startswith(joint)), "")
        means = [self._means.get(f"{joint}{suffix}", RequestMean()) for _, suffix in self._suffixes(ranker)]
        counts = sum_over_job(torch.stack([means[0].skipped, *(mean.count for mean in means)]))
        return dict(zip(("requests_without_positives", "requests", *self.slices), counts.tolist(), strict=True))

    def _slice_number(self, name: str) -> int:
        """Return 1, 2, ... for metrics of slices, 0 for all others."""
        end = name.partition("/")[0].rpartition("_")[2]
        return self.slices.index(end) + 1 if "@" in name and end in self.slices else 0

    def _suffixes(self, column: str) -> list[tuple[str, str]]:
        """Return the slices, "" = all requests, and the ends of the names of their metrics."""
        return [("", f"/{column}"), *((name, f"_{name}/{column}") for name in self.slices)]

    def _add_beyond_accuracy(self, suffix: str, requests: Requests, candidates: Candidates) -> None:
        """Add exposure, novelty, popularity lift and diversity of the requests with a positive."""
        assert self._items is not None
        has_positive = self._positive(requests).any(1)
        shown = candidates.rows[candidates.mask & has_positive[:, None]]
        if suffix not in self._exposure:
            self._exposure[suffix] = torch.zeros_like(self._items.item_id)
        self._exposure[suffix] += torch.bincount(shown, minlength=self._items.item_id.numel())
        if self._log is not None and self._log.sequences is not None and requests.earlier is not None:
            counts = self._log.user_counts
            values, counted = mean_novelty(counts[candidates.rows], candidates.mask, users=self._log.users)
            self.add_mean(f"novelty{suffix}", values, counted & has_positive)
            earlier = requests.earlier
            list_popularity, any_listed = mean_popularity(counts[candidates.rows], candidates.mask)
            earlier_popularity, any_earlier = mean_popularity(counts[earlier.clamp_min(0)], earlier >= 0)
            lift = self._lift.setdefault(f"popularity_lift{suffix}", (RequestMean(), RequestMean()))
            for mean, value in zip(lift, (list_popularity, earlier_popularity), strict=True):
                mean.to(value.device).update(value, has_positive & any_listed & any_earlier)
        for name, (columns, padding) in self._features.items():
            ids = self._items.features[:, columns][candidates.rows]
            present = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
            values, counted = intra_list_diversity(ids, present, candidates.mask)
            self.add_mean(f"diversity_{name}{suffix}", values, counted & has_positive)

    def _of_slice(self, name: str, requests: Requests, candidates: Candidates | None) -> tuple[Requests, Candidates]:
        """Return requests and lists in which items outside the slice have label 0."""
        if candidates is None:
            candidates = Candidates(requests.own, requests.labels, requests.labels, requests.mask)
        if not name:
            return requests, candidates
        if name in ("new", "warm"):
            assert self._log is not None
            in_slice = (self._log.counts == 0) == (name == "new")
            own_in_slice, candidates_in_slice = in_slice[requests.own], in_slice[candidates.rows]
        else:
            earlier = requests.earlier
            length = requests.batch.history_length if earlier is None else (earlier >= 0).sum(1)
            own_in_slice = candidates_in_slice = ((length <= self.short) == (name == "short"))[:, None]
        return (
            replace(requests, labels=torch.where(own_in_slice, requests.labels, 0.0)),
            replace(candidates, labels=torch.where(candidates_in_slice, candidates.labels, 0.0)),
        )

    def _positive(self, requests: Requests) -> Tensor:
        return requests.mask & (requests.labels > self.positive_above)

    def _normalised(self, requests: Requests, dcg: Tensor, cut: int) -> tuple[Tensor, Tensor]:
        best = ideal_dcg(self._gains(requests), cut)
        counted = self._positive(requests).any(1) & (best > 0)
        return torch.where(counted, dcg / torch.where(counted, best, 1.0), 0.0), counted

    def _gains(self, requests: Requests) -> Tensor:
        return torch.where(requests.mask, gains(requests.labels.double(), self.gain), 0.0)

    def _close(self) -> None:
        """Keep the exposure metrics of the catalogue that was measured last, if there is one."""
        if self._exposure:
            self._closed.append(self._catalogue_metrics())
            self._exposure = {}

    def _catalogue_metrics(self) -> dict[str, float]:
        metrics = {}
        for suffix, exposure in self._exposure.items():
            total = sum_over_job(exposure)
            metrics[f"coverage{suffix}"] = float(catalogue_coverage(total))
            metrics[f"gini{suffix}"] = float(gini(total))
        return metrics


def _head(lists: Candidates, cut: int) -> Candidates:
    return Candidates(*(part[:, :cut] for part in (lists.rows, lists.scores, lists.labels, lists.mask)))
