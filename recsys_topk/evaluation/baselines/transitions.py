"""Counts of which item follows which."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from recsys_topk.cascades.successors import count_pairs
from recsys_topk.checks import check_count
from recsys_topk.evaluation.baselines.base import Baseline
from recsys_topk.evaluation.training_log import TrainingLog


class Transitions(Baseline):
    """Next-item counts: which items follow the user's newest items in other users' sequences.

    c(i, j) = sum of 1 / gap over all pairs where j follows i in a user's sequence at distance gap <= `gaps`, divided by
    (1 + sum_i c(i, j)) ** damping. Score of j = sum over the `newest` items of the history of c(item, j) / age, with
    age 1 for the last item. Memory: O(distinct pairs).

    Args:
        gaps: Largest distance of two items in a sequence.
        newest: Number of items of the history that are used.
        damping: Exponent of the popularity by which counts are divided; 0 = no damping.
    """

    name: ClassVar[str] = "transitions"

    def __init__(self, gaps: int = 5, newest: int = 5, damping: float = 0.3) -> None:
        self.gaps, self.newest, self.damping = check_count("gaps", gaps), check_count("newest", newest), damping

    def fit(self, log: TrainingLog) -> None:
        """Count the pairs."""
        user, item = log.interactions(self.name)
        size = log.items
        before, self._to, weight = count_pairs(user, item, size, self.gaps)
        popularity = 1 + np.bincount(self._to, weight, size)
        self._weight = weight / popularity[self._to] ** self.damping
        self._ends = np.searchsorted(before, np.arange(size + 1))

    def scores(self, histories: Tensor) -> Tensor:
        """See `Baseline.scores`."""
        history, size = histories.numpy(), len(self._ends) - 1
        scores = np.zeros(len(history) * size)
        length = (history >= 0).sum(1)
        for age in range(1, min(self.newest, history.shape[1]) + 1):
            request = np.flatnonzero(length >= age)
            item = history[request, length[request] - age]
            number = self._ends[item + 1] - self._ends[item]
            pair = np.arange(number.sum()) + np.repeat(self._ends[item] - np.cumsum(number) + number, number)
            cell = np.repeat(request, number) * size + self._to[pair]
            scores[cell] += self._weight[pair] / age  # the cells of one age are distinct
        return torch.from_numpy(scores.reshape(-1, size))
