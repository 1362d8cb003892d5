"""DIN pre-ranker: each candidate attends to the user's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.cascades.encoders.relative_bias import RelativeBias
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import Stage, StageOptions
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops.stages.attention import attention_logits

# Number of (request, candidate) pairs that are scored at once without gradients.
PAIRS_AT_ONCE = 8192
# Number of distances from the newest view with a separate bias.
DISTANCES = 64


class DIN(Stage):
    """Score = MLP([request, interest, item]); interest = sum_l a_l view_l, a = softmax of a perceptron on [view, item].

    The attention perceptron (Zhou et al. 2018) has one hidden layer with ReLU. It reads the item features whose tables
    the history also uses, or all item features if there are none. The first layers of the attention and of the MLP are
    applied once per view, request and pool item (see `attention_logits`). The result is the same and costs much less.
    The interest of an empty history is 0. With an ordered `history`, the logits get a learned bias by the distance from
    the newest view and, where the data has ages, by the gap. With a contextual one, the views are its states.

    Args:
        embedding: The embedding tables.
        hidden: Widths of the hidden layers; a last layer of width 1 follows.
        attention: Width of the attention's hidden layer.
        options: Options of every stage; see `Stage`. The attention always uses ReLU without batch norm.
    """

    name: ClassVar[str] = "din"

    def __init__(
        self,
        embedding: FeatureEmbedding,
        hidden: Sequence[int] = (128, 128, 32),
        attention: int = 80,
        **options: Unpack[StageOptions],
    ) -> None:
        super().__init__(embedding, **options)
        dims = embedding.dims
        if not dims["history"]:
            raise ValueError(
                f"the stage {self.name!r} attends to the user's history, but the schema has no history features; "
                f"use the stage 'mlp'"
            )
        self.query_dim = embedding.shared_dim or dims["items"]
        assert self.encoder is not None
        self.bias = RelativeBias(1, DISTANCES, self.encoder.ages, slope=0.0) if self.encoder.ordered else None
        if not self.encoder.contextual:
            self.encoder, self.history_dim = None, dims["history"]
        self.attention = self.perceptron(
            [self.history_dim, self.query_dim], [attention, 1], activation="relu", batch_norm=None, dropout=0.0
        )
        # The output bias shifts all logits equally. It would get no gradient, and DDP would wait for one.
        self.attention.last.bias.requires_grad_(False)
        self.mlp = self.perceptron([dims["request"], self.history_dim, dims["items"]], [*hidden, 1])

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        embedded = self.embedding(batch, history="rows")
        history, biases = embedded.history, embedded.history.new_zeros(batch.size, 0)
        if self.encoder is not None:
            states = self.encoder.prefixes(history, batch.history_length, embedded.ages)[:, 1:]
            history = torch.where(batch.history_mask[..., None], states, 0.0)
        if self.bias is not None:
            biases = self.bias.from_newest(history.shape[1], batch.history_length, embedded.ages)
        # Computed once per view, pool item and request: everything that does not depend on a (request, candidate) pair.
        views = self.attention.project(0, history) + self.attention.first.bias
        queries = self.attention.project(1, embedded.items[:, : self.query_dim])
        request, items = self.mlp.project(0, embedded.request), self.mlp.project(2, embedded.items)

        def pairs(*parts: Tensor) -> Tensor:
            views, history, biases, request, candidates, mask, lengths, real = parts
            logits = attention_logits(views, queries, self.attention.last.weight[0], candidates, lengths)
            logits = logits if self.bias is None else logits + biases
            projected_interests = self.mlp.project(1, weighted_views(logits, real, history))
            return self.mlp.joined(projected_interests, request, items, candidates, mask).squeeze(-1)

        lists = (batch.candidates, batch.mask, batch.history_length, batch.history_mask)
        whole = (views, history, biases, request, *lists)
        if torch.is_grad_enabled() or torch.compiler.is_exporting():
            return pairs(*whole)
        # Without gradients nothing has to be stored, so a few lists at a time are computed in the CPU cache.
        step = max(1, PAIRS_AT_ONCE // max(1, batch.candidates.shape[1]))
        return torch.cat([pairs(*(x[row : row + step] for x in whole)) for row in range(0, max(1, batch.size), step)])


def weighted_views(logits: Tensor, real: Tensor, history: Tensor) -> Tensor:
    """Return sum_l softmax(logits)_l history_l over the real views, (B, N, D), and 0 where there are no views.

    Args:
        logits: (B, N, L).
        real: Boolean, (B, L).
        history: (B, L, D), 0 where there is no view.
    """
    # A finite value instead of minus infinity: without views the weights are uniform over embeddings that are 0.
    return torch.bmm(torch.where(real[:, None], logits, -1e30).softmax(-1), history)
