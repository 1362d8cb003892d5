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
    """Score = <user tower(request, mean of the history), item tower(item)> (Huang et al. 2013).

    The item tower runs once per pool item, also if the item occurs in many lists.

    Args:
        embedding: The embedding tables.
        hidden: Widths of both towers; the last one is the width of the vectors.
        options: Options of every stage; see `Stage`.
    """

    name: ClassVar[str] = "two_tower"

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
        self.user_tower = self.perceptron([dims["request"], dims["history"]], hidden)
        self.item_tower = self.perceptron([dims["items"]], hidden)
        self.width = hidden[-1]

    def encode_requests(self, embedded: Embedded) -> Tensor:
        """See `Towers.encode_requests`."""
        vectors: Tensor = self.user_tower(torch.cat([embedded.request, embedded.history], dim=1))
        return vectors

    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        """See `Towers.encode_items`."""
        vectors: Tensor = self.item_tower(embedded.items, real)
        return vectors
