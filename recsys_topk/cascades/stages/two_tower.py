"""Two-tower retriever (DSSM): the dot product of a request vector and an item vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from recsys_topk.cascades.features import Embedded, FeatureEmbedding
from recsys_topk.cascades.layers import MLP, Activation, Initialisation
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.pooled_dot import dot


class TwoTower(Stage):
    """Score = <user tower(request, mean of the history), item tower(item)> (Huang et al. 2013).

    The item tower runs once per pool item, also if the item occurs in many lists.

    Args:
        embedding: The embedding tables.
        hidden: Widths of both towers; the last one is the width of the vectors.
        activation: ``"relu"`` or ``"prelu"``.
        batch_norm: Share of the running averages that is kept at each step, or None for no batch norm.
        initialisation: ``"default"`` or ``"he"``.
    """

    name: ClassVar[str] = "two_tower"

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
        if not dims["request"] + dims["history"]:
            raise ValueError(
                f"the stage {self.name!r} needs request or history features, but the schema has neither; "
                f"use the stage 'mlp'"
            )
        self.user_tower = MLP([dims["request"], dims["history"]], hidden, activation, batch_norm, initialisation)
        self.item_tower = MLP([dims["items"]], hidden, activation, batch_norm, initialisation)

    @property
    def width(self) -> int:
        """Width of the vectors, D."""
        return self.item_tower.last.out_features

    def encode_requests(self, embedded: Embedded) -> Tensor:
        """Return the vectors of the requests, (B, D). The history is embedded as its mean."""
        vectors: Tensor = self.user_tower(torch.cat([embedded.request, embedded.history], dim=1))
        return vectors

    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        """Return the vectors of the pool items, (M, D); `real`, boolean (M,), marks the rows that are items."""
        vectors: Tensor = self.item_tower(embedded.items, real)
        return vectors

    def encode(self, batch: CascadeBatch) -> tuple[Tensor, Tensor]:
        """Return request vectors (B, D) and pool item vectors (M, D)."""
        embedded = self.embedding(batch, history="mean")
        # Except on a CPU, a pool with sampled negatives may end in rows that are not items, with negative ids.
        real = None if may_read(batch.item_id) else batch.item_id >= 0
        return self.encode_requests(embedded), self.encode_items(embedded, real)

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        users, items = self.encode(batch)
        return dot(users, items, batch.candidates)
