"""Matrix factorisation by alternating least squares, by `implicit`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from recsys_topk.checks import check_count
from recsys_topk.evaluation.baselines.base import Baseline
from recsys_topk.evaluation.baselines.implicit_models import fit_implicit, history_matrix
from recsys_topk.evaluation.training_log import TrainingLog


class ALS(Baseline):
    """Implicit-feedback matrix factorisation (Hu et al. 2008). Needs `implicit`.

    Score = <user factors, item factors>. The user factors are solved for the whole history of the request, which may be
    longer than in training.

    Args:
        factors: Number of factors.
        regularization: Weight of the squared norm of the factors.
        alpha: Weight of an interaction.
        iterations: Number of alternations.
        seed: Seed of the first factors.
    """

    name: ClassVar[str] = "als"

    def __init__(
        self, factors: int = 64, regularization: float = 1.0, alpha: float = 10.0, iterations: int = 15, seed: int = 0
    ) -> None:
        self.factors, self.iterations = check_count("factors", factors), check_count("iterations", iterations)
        self.regularization, self.alpha, self.seed = regularization, alpha, seed

    def fit(self, log: TrainingLog) -> None:
        """Factorise the user-item matrix."""
        options = {"regularization": self.regularization, "alpha": self.alpha, "iterations": self.iterations}
        path = "cpu.als.AlternatingLeastSquares"
        self._model = fit_implicit(path, self.name, log, factors=self.factors, random_state=self.seed, **options)

    def scores(self, histories: Tensor) -> Tensor:
        """See `Baseline.scores`."""
        item_factors = self._model.item_factors
        user_items = history_matrix(histories, len(item_factors))
        return torch.from_numpy(self._model.recalculate_user(np.arange(len(histories)), user_items) @ item_factors.T)
