"""DIN pre-ranker: each candidate attends to the user's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from recsys_topk.cascades.attention import attention_logits
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.layers import MLP, Activation, Initialisation
from recsys_topk.cascades.stage import Stage, gather
from recsys_topk.datamodules.batch import CascadeBatch


class DIN(Stage):
    """Score = MLP([request, interest, item]); interest = sum_l a_l view_l, a = softmax of a perceptron on [view, item].

    The attention perceptron (Zhou et al. 2018) has one hidden layer with a rectifier and reads the item features that
    the history has too. Its first layer and that of the MLP are applied once a view, a request and a pool item
    (see `attention_logits`), which gives the same function at a fraction of the cost. An empty history has the
    interest 0.

    Args:
        embedding: The embedding tables.
        hidden: Widths of the hidden layers; a last layer of width 1 follows.
        attention: Width of the attention's hidden layer.
        activation: ``"relu"`` or ``"prelu"``, of the MLP.
        batch_norm: Share of the running averages that is kept at each step, or None for no batch norm.
        initialisation: ``"default"`` or ``"he"``.
    """

    name: ClassVar[str] = "din"

    def __init__(
        self,
        embedding: FeatureEmbedding,
        hidden: Sequence[int] = (128, 128, 32),
        attention: int = 80,
        activation: Activation = "relu",
        batch_norm: float | None = None,
        initialisation: Initialisation = "default",
    ) -> None:
        super().__init__(embedding)
        dims = embedding.dims
        self.attention = MLP([dims["history"], dims["history"]], [attention, 1], "relu", None, initialisation)
        parts = [dims["request"], dims["history"], dims["items"]]
        self.mlp = MLP(parts, [*hidden, 1], activation, batch_norm, initialisation)

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        embedded = self.embedding(batch, history="rows")
        interest = self.interest(batch, embedded.history, embedded.items)
        shared = gather(self.mlp.project(2, embedded.items), batch.candidates)
        request = self.mlp.project(0, embedded.request)
        hidden = self.mlp.project(1, interest).add_(shared).add_(request[:, None])
        return self.mlp.rest(hidden, batch.mask).squeeze(-1)

    def interest(self, batch: CascadeBatch, history: Tensor, items: Tensor) -> Tensor:
        """Return each candidate's weighted sum of the history, (B, N, D_h)."""
        views = self.attention.project(0, history) + self.attention.first.bias
        queries = self.attention.project(1, items[:, : history.shape[-1]])
        logits = attention_logits(views, gather(queries, batch.candidates), self.attention.last.weight[0])
        # The output bias moves all logits alike, so the softmax does not see it. A finite stand-in for minus infinity:
        # where there is no view at all the weights are uniform over embeddings that are 0.
        weights = torch.where(batch.history_mask[:, None], logits, -1e30).softmax(-1)
        return torch.bmm(weights, history)
