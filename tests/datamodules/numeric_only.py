"""A data module with numeric features only: no table, no user, no history, lists of different lengths."""

from __future__ import annotations

from typing import Any

import torch

from recsys_topk.datamodules import CascadeDataModule, Catalogue, Feature, Schema, Shard, TensorShard

FEATURES, ITEMS = 4, 300


class NumericOnly(CascadeDataModule):
    """Grades 0 to 2 that are a function of the first feature.

    Args:
        requests: Requests per split.
        options: See `CascadeDataModule`.
    """

    def __init__(self, requests: int = 48, **options: Any) -> None:
        super().__init__(**{"batch_size": 16, "eval_negatives": 0, **options})
        self.requests = requests
        values = torch.randn(ITEMS, FEATURES, generator=torch.Generator().manual_seed(0))
        self.items = Catalogue(torch.arange(ITEMS), torch.empty(ITEMS, 0, dtype=torch.int64), values=values)

    @property
    def schema(self) -> Schema:
        features = tuple(Feature(f"f{number}", kind="numeric") for number in range(FEATURES))
        return Schema(tables=(), request=(), history=(), items=features, groups=("listed",))

    def open_shard(self, name: str) -> Shard:
        start = ("train", "val", "test").index(name)
        draw = torch.Generator().manual_seed(1 + start)
        lists = torch.rand(self.requests, ITEMS, generator=draw).argsort(1)[:, :12]
        length = torch.randint(1, 13, (self.requests,), generator=draw)
        lists = torch.where(torch.arange(12) < length[:, None], lists, -1)
        grades = (self.items.values[lists, 0] + 0.5).clamp(0, 2).floor()
        return TensorShard(name, self.items, 1000 * start + torch.arange(self.requests), lists, grades)
