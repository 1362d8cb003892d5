"""MLP pre-ranker: one perceptron on request, pooled history and item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage, StageOptions
from recsys_topk.datamodules.batch import CascadeBatch


class MLPStage(Stage):
    """Score = MLP([request, encoded history, item]).

    The first layer is applied once per request and once per pool item. Both results are added for each candidate.

    Args:
        embedding: The embedding tables.
        hidden: Widths of the hidden layers; a last layer of width 1 follows.
        options: Options of every stage; see `Stage`.
    """

    name: ClassVar[str] = "mlp"
    shares_histories: ClassVar[bool] = True

    def __init__(
        self, embedding: FeatureEmbedding, hidden: Sequence[int] = (128, 64, 32), **options: Unpack[StageOptions]
    ) -> None:
        super().__init__(embedding, **options)
        dims = embedding.dims
        self.mlp = self.perceptron([dims["request"], self.history_dim, dims["items"]], [*hidden, 1])

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        embedded = self.embed(batch)
        request = self.mlp.project(0, embedded.request) + self.mlp.project(1, embedded.history)
        item = self.mlp.project(2, embedded.items)
        return self.mlp.joined(None, request, item, batch.candidates, batch.mask).squeeze(-1)
