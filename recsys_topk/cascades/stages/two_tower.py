"""Two-tower retriever (DSSM): the dot product of a request vector and an item vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.cascades.features import Embedded, FeatureEmbedding
from recsys_topk.cascades.stage import StageOptions
from recsys_topk.cascades.towers import Towers


class TwoTower(Towers):
    """Score = <user tower(request, encoded history), item tower(item)> (Huang et al. 2013).

    The item tower runs once per pool item, also if the item occurs in many lists. Without hidden layers, the item
    vector is the item's embedding, and the user tower is one linear layer (SASRec: Kang and McAuley 2018).

    Args:
        embedding: The embedding tables.
        hidden: Widths of both towers; the last one is the width of the vectors. Empty = see above.
        options: Options of every stage; see `Stage`.
    """

    name: ClassVar[str] = "two_tower"
    shares_histories: ClassVar[bool] = True

    def __init__(
        self, embedding: FeatureEmbedding, hidden: Sequence[int] = (128, 64, 32), **options: Unpack[StageOptions]
    ) -> None:
        super().__init__(embedding, **options)
        dims = embedding.dims
        if not dims["request"] + dims["history"]:
            raise ValueError(
                f"the stage {self.name!r} needs request or history features, but the schema has neither; "
                f"use the stage 'mlp'"
            )
        self.width = hidden[-1] if hidden else dims["items"]
        self.user_tower = self.perceptron([dims["request"], self.history_dim], hidden or [self.width])
        self.item_tower = self.perceptron([dims["items"]], hidden) if hidden else None
        if not hidden and self.history_dim == self.width:  # starts as <encoded history, item>
            with torch.no_grad():
                self.user_tower.first.weight[:, dims["request"] :] = torch.eye(self.width)
                self.user_tower.first.bias.zero_()

    def encode_requests(self, embedded: Embedded) -> Tensor:
        """See `Towers.encode_requests`."""
        vectors: Tensor = self.user_tower(torch.cat([embedded.request, embedded.history], dim=1))
        return vectors

    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        """See `Towers.encode_items`."""
        vectors: Tensor = embedded.items if self.item_tower is None else self.item_tower(embedded.items, real)
        return vectors
