"""The most popular items, for everybody."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from recsys_topk.evaluation.baselines.base import Baseline
from recsys_topk.evaluation.search import Candidates, Requests, best_of, contains
from recsys_topk.evaluation.training_log import TrainingLog


class MostPopular(Baseline):
    """Score = how often an item is a positive in the training data."""

    name: ClassVar[str] = "popularity"

    def fit(self, log: TrainingLog) -> None:
        """Sort the items by their counts."""
        self._counts = log.counts
        self._order = log.counts.sort(descending=True, stable=True).indices

    def scores(self, histories: Tensor) -> Tensor:
        """See `Baseline.scores`."""
        return self._counts.expand(histories.shape[0], -1)

    def candidates(self, requests: Requests, number: int, *, items: int) -> Candidates:
        """See `Baseline.candidates`. Only the most popular items are compared."""
        removed = torch.cat([torch.where(requests.mask, requests.own, -1), requests.excluded], 1)
        head = self._order[: number + removed.shape[1]].expand(removed.shape[0], -1)
        head_mask = ~contains(removed, head)
        rows = torch.cat([head, requests.own], 1)
        labels = torch.cat([torch.zeros_like(head, dtype=torch.float32), requests.labels.float()], 1)
        scores = self._counts[rows].double()
        return best_of(rows, scores, labels, torch.cat([head_mask, requests.mask], 1), number)
