"""Two-tower retriever (DSSM): the dot product of a request vector and an item vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from recsys_topk.cascades.encoders.recency import RecencyEncoder
from recsys_topk.cascades.features import Embedded, FeatureEmbedding
from recsys_topk.cascades.popularity_shift import popularity_shift
from recsys_topk.cascades.singular_vectors import unit_vectors
from recsys_topk.cascades.stage import StageOptions, embed
from recsys_topk.cascades.towers import Towers
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.tabular.schema import Feature, Schema
from recsys_topk.types import Array


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
        popularity: Whether the score gets the term a log(1 + occurrences of the item in the training sequences), with a
            learned scale a that starts at 1. A softmax over the catalogue then starts at the popularity of the items,
            not at a uniform distribution. The vectors get one more column. If all evaluation requests are later than
            the training data (``--data.split time``), the score gets `popularity_shift` too, outside of training: the
            popularity at the end of the training data.
        warm_start: Whether the table of the item ids starts at the singular vectors of the training sequences, with the
            length of its random start, instead of at random. Then the model knows from the first step which items
            have the same users, and learns more from few interactions. Not for sharded tables.
        options: Options of every stage; see `Stage`.
    """

    name: ClassVar[str] = "two_tower"
    shares_histories: ClassVar[bool] = True
    popularity: Tensor
    shift: Tensor
    started: Tensor

    def __init__(
        self,
        embedding: FeatureEmbedding,
        hidden: Sequence[int] = (128, 64, 32),
        transitions: int = 0,
        popularity: bool = False,
        warm_start: bool = False,
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
        self.width = width + transitions + popularity
        self.pairs, self.recency = None, None
        if transitions:
            self.pairs = embedding.pair_tables(_item_id(embedding.schema).name, transitions)
            self.recency = RecencyEncoder(transitions, embedding.layout.has_ages, heads=1, slope=0.5)
        self.counts_sequences = popularity or warm_start
        self.popularity_scale = nn.Parameter(torch.ones(1)) if popularity else None
        if self.counts_sequences:
            schema, item_id = embedding.schema, _item_id(embedding.schema)
            self.item_table = schema.table(str(item_id.table))
            self.item_column = schema.id_columns("items")[item_id.name].start
        if popularity:
            self.register_buffer("popularity", torch.zeros(self.item_table.rows))
            self.register_buffer("shift", torch.zeros(self.item_table.rows))
        if warm_start:  # False before the start: a resumed training does not start again
            self.register_buffer("started", torch.zeros((), dtype=torch.bool))

    def count(self, user: Array, items: Array) -> None:
        """See `Stage.count`."""
        item = items[:, self.item_column]
        if self.popularity_scale is not None:
            counts = np.bincount(item, minlength=self.item_table.rows)
            self.popularity.copy_(torch.from_numpy(counts).log1p())
        if "started" in self._buffers and not self.started:
            table = self.embedding.table(self.item_table.name)
            vectors, known = unit_vectors(user, item, *table.shape)
            length = self.embedding.init_std * table.shape[1] ** 0.5
            with torch.no_grad():
                table[known] = length * vectors[known].to(table)
            self.started.fill_(True)

    def count_times(self, user: Array, items: Array, time: Array) -> None:
        """See `Stage.count_times`."""
        if self.popularity_scale is not None:
            shift = popularity_shift(user, items[:, self.item_column], time, self.item_table.rows)
            self.shift.copy_(torch.from_numpy(shift))

    def embed(self, batch: CascadeBatch) -> Embedded:
        """See `Stage.embed`. With transitions, their columns are the last ones of history and items."""
        embedded = super().embed(batch)
        if self.pairs is not None:
            pairs = embed(self.pairs, self.recency, batch)
            history = torch.cat([embedded.history, pairs.history], 1)
            embedded = replace(embedded, history=history, items=torch.cat([embedded.items, pairs.items], 1))
        if self.popularity_scale is not None and batch.items.shape[1]:  # the exported user tower has no items
            item = batch.items[:, self.item_column].clamp_min(0)
            column = self.popularity[item]
            if not (self.training or batch.catalogue):
                column = column + self.shift[item] / self.popularity_scale.clamp_min(0.05)
            embedded = replace(embedded, items=torch.cat([embedded.items, column[:, None]], 1))
        return embedded

    def encode_requests(self, embedded: Embedded) -> Tensor:
        """See `Towers.encode_requests`."""
        history, pairs = embedded.history[:, : self.history_dim], embedded.history[:, self.history_dim :]
        vectors: Tensor = self.user_tower(torch.cat([embedded.request, history], dim=1))
        columns = [pairs] if self.pairs is not None else []
        if self.popularity_scale is not None:
            columns.append(self.popularity_scale.to(vectors.dtype).expand(vectors.shape[0], 1))
        return torch.cat([vectors, *columns], dim=1) if columns else vectors

    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        """See `Towers.encode_items`."""
        width = self.embedding.dims["items"]
        items, columns = embedded.items[:, :width], embedded.items[:, width:]
        vectors: Tensor = items if self.item_tower is None else self.item_tower(items, real)
        return torch.cat([vectors, columns], dim=1) if columns.shape[1] else vectors


def _item_id(schema: Schema) -> Feature:
    """Return the first categorical feature of the items that views have too."""
    views = {feature.name for feature in schema.history}
    for feature in schema.items:
        if feature.kind == "categorical" and feature.name in views:
            return feature
    raise ValueError(
        "the options transitions, popularity and warm_start of two_tower need a categorical feature that the history "
        "and the items have in common; use --data interactions, or leave them out"
    )
