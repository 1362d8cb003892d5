"""MLP pre-ranker: one perceptron on request, pooled history and item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.layers import MLP, Activation, Initialisation
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch


class MLPStage(Stage):
    """Score = MLP([request, mean of the history, item]).

    The first layer is applied once per request and once per pool item. Both results are added for each candidate.

    Args:
        embedding: The embedding tables.
        hidden: Widths of the hidden layers; a last layer of width 1 follows.
        activation: ``"relu"`` or ``"prelu"``.
        batch_norm: Share of the running averages that is kept at each step, or None for no batch norm.
        initialisation: ``"default"`` or ``"he"``.
    """

    name: ClassVar[str] = "mlp"

    def __init__(
        self,
        embedding: FeatureEmbedding,
        hidden: Sequence[int] = (128, 64, 32),
        activation: Activation = "relu",
        batch_norm: float | None = None,
        initialisation: Initialisation = "default",
    ) -> None:
        super().__init__(embedding)
        dims = embedding.dims
        parts = [dims["request"], dims["history"], dims["items"]]
        self.mlp = MLP(parts, [*hidden, 1], activation, batch_norm, initialisation)

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        embedded = self.embedding(batch, history="mean")
        request = self.mlp.project(0, embedded.request) + self.mlp.project(1, embedded.history)
        item = self.mlp.project(2, embedded.items)
        return self.mlp.joined(None, request, item, batch.candidates, batch.mask).squeeze(-1)
