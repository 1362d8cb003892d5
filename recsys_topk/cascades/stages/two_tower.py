"""Two-tower retriever (DSSM): the dot product of a request vector and an item vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.cascades.encoders.recency import RecencyEncoder
from recsys_topk.cascades.features import Embedded, FeatureEmbedding
from recsys_topk.cascades.stage import StageOptions, embed
from recsys_topk.cascades.towers import Towers
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Schema


class TwoTower(Towers):
    """Score = <user tower(request, encoded history), item tower(item)> (Huang et al. 2013).

    The item tower runs once per pool item, also if the item occurs in many lists. Without hidden layers, the item
    vector is the item's embedding, and the user tower is one linear layer (SASRec: Kang and McAuley 2018).

    Args:
        embedding: The embedding tables.
        hidden: Widths of both towers; the last one is the width of the vectors. Empty = see above.
        transitions: Width of a second pair of tables; 0 = none. The score gets the term <sum_j w_j a(view_j), b(item)>,
            where a and b are tables of item ids, and w are learned weights by recency (`RecencyEncoder`). It learns
            which items follow which. Both vectors get this many columns.
        options: Options of every stage; see `Stage`.
    """

    name: ClassVar[str] = "two_tower"
    shares_histories: ClassVar[bool] = True

    def __init__(
        self,
        embedding: FeatureEmbedding,
        hidden: Sequence[int] = (128, 64, 32),
        transitions: int = 0,
        **options: Unpack[StageOptions],
    ) -> None:
        super().__init__(embedding, **options)
        dims = embedding.dims
        if not dims["request"] + dims["history"]:
            raise ValueError(
                f"the stage {self.name!r} needs request or history features, but the schema has neither; "
                f"use the stage 'mlp'"
            )
        width = hidden[-1] if hidden else dims["items"]
        self.user_tower = self.perceptron([dims["request"], self.history_dim], hidden or [width])
        self.item_tower = self.perceptron([dims["items"]], hidden) if hidden else None
        if not hidden and self.history_dim == width:  # starts as <encoded history, item>
            with torch.no_grad():
                self.user_tower.first.weight[:, dims["request"] :] = torch.eye(width)
                self.user_tower.first.bias.zero_()
        self.width = width + transitions
        self.pairs, self.recency = None, None
        if transitions:
            self.pairs = embedding.pair_tables(_item_id(embedding.schema), transitions)
            self.recency = RecencyEncoder(transitions, embedding.layout.has_ages, heads=1, slope=0.5)

    def embed(self, batch: CascadeBatch) -> Embedded:
        """See `Stage.embed`. With transitions, their columns are the last ones of history and items."""
        embedded = super().embed(batch)
        if self.pairs is None:
            return embedded
        pairs = embed(self.pairs, self.recency, batch)
        both = {part: torch.cat([getattr(one, part) for one in (embedded, pairs)], 1) for part in ("history", "items")}
        return replace(embedded, **both)

    def encode_requests(self, embedded: Embedded) -> Tensor:
        """See `Towers.encode_requests`."""
        history, pairs = embedded.history[:, : self.history_dim], embedded.history[:, self.history_dim :]
        vectors: Tensor = self.user_tower(torch.cat([embedded.request, history], dim=1))
        return vectors if self.pairs is None else torch.cat([vectors, pairs], dim=1)

    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        """See `Towers.encode_items`."""
        width = self.embedding.dims["items"]
        items, pairs = embedded.items[:, :width], embedded.items[:, width:]
        vectors: Tensor = items if self.item_tower is None else self.item_tower(items, real)
        return vectors if self.pairs is None else torch.cat([vectors, pairs], dim=1)


def _item_id(schema: Schema) -> str:
    """Return the first categorical feature that views and items have in common."""
    items = {(one.name, one.table) for one in schema.items if one.kind == "categorical"}
    for one in schema.history:
        if (one.name, one.table) in items:
            return one.name
    raise ValueError("transitions need a categorical feature that the history and the items have in common; use 0")
