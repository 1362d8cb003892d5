"""A linear model of items by items with a closed form (EASE)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from recsys_topk.evaluation.baselines.base import Baseline
from recsys_topk.evaluation.baselines.implicit_models import sparse_matrix
from recsys_topk.evaluation.training_log import TrainingLog

MOST_ITEMS = 30_000


class EASE(Baseline):
    """Ridge regression of each item on all other items (Steck 2019). Needs SciPy.

    Score of item j = sum of B_ij over the items i of the history, where B = I - P diag(P)^-1 with
    P = (X^T X + l I)^-1 for the matrix X of users and items, so that B has a zero diagonal. Cost: O(C^3) once, 16 C^2
    bytes of memory for C items.

    Args:
        regularization: l, the weight of the squared norm.
    """

    name: ClassVar[str] = "ease"

    def __init__(self, regularization: float = 200.0) -> None:
        if not regularization > 0:
            raise ValueError(f"regularization must be above 0, got {regularization}")
        self.regularization = regularization

    def fit(self, log: TrainingLog) -> None:
        """Solve for B."""
        if log.items > MOST_ITEMS:
            raise ValueError(
                f"the baseline {self.name!r} inverts a matrix of items x items: at most {MOST_ITEMS:,} items, got "
                f"{log.items:,}; leave it out"
            )
        user, item = log.interactions(self.name)
        user_items = sparse_matrix(user, item, (int(user.max(initial=0)) + 1, log.items))
        gram = torch.from_numpy((user_items.T @ user_items).toarray()).double()
        gram.diagonal().add_(self.regularization)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        self._weights = (inverse / -inverse.diagonal()).fill_diagonal_(0).float()

    def scores(self, histories: Tensor) -> Tensor:
        """See `Baseline.scores`."""
        user_items = torch.zeros(len(histories), len(self._weights) + 1)
        return user_items.scatter_(1, histories.remainder(user_items.shape[1]), 1.0)[:, :-1] @ self._weights
