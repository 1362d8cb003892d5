"""Item-based nearest neighbours, by `implicit`."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from recsys_topk.checks import check_count
from recsys_topk.evaluation.baselines.base import Baseline
from recsys_topk.evaluation.baselines.implicit_models import fit_implicit, history_matrix
from recsys_topk.evaluation.training_log import TrainingLog

_MODELS = {"cosine": "CosineRecommender", "tfidf": "TFIDFRecommender", "bm25": "BM25Recommender"}


class ItemKNN(Baseline):
    """Score of an item = sum of its similarities to the items of the history.

    Only the `neighbours` most similar items of an item have a similarity. Needs `implicit`.

    Args:
        neighbours: Number of similar items that are kept per item.
        weighting: How interactions are weighted before the cosine: ``"cosine"`` (equally), ``"tfidf"`` or ``"bm25"``.
    """

    name: ClassVar[str] = "itemknn"

    def __init__(self, neighbours: int = 100, weighting: Literal["cosine", "tfidf", "bm25"] = "tfidf") -> None:
        if weighting not in _MODELS:
            raise ValueError(f"weighting must be one of {', '.join(_MODELS)}, got {weighting!r}")
        self.neighbours, self.weighting = check_count("neighbours", neighbours), weighting

    def fit(self, log: TrainingLog) -> None:
        """Compute the similarities."""
        model = fit_implicit(f"nearest_neighbours.{_MODELS[self.weighting]}", self.name, log, K=self.neighbours)
        self._similarity = model.similarity

    def scores(self, histories: Tensor) -> Tensor:
        """See `Baseline.scores`."""
        return torch.from_numpy((history_matrix(histories, self._similarity.shape[0]) @ self._similarity).toarray())
