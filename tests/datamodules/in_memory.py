"""A small data module of tensors in memory, with features of all four kinds, a history and short lists."""

from __future__ import annotations

from typing import Any

import torch

from recsys_topk.datamodules import CascadeDataModule, Catalogue, Feature, Schema, Shard, Table, TensorShard

ITEMS, GENRES, USERS = 60, 6, 25


class InMemory(CascadeDataModule):
    """Users click on items whose vector is similar to theirs.

    Args:
        requests: Requests per split.
        options: See `CascadeDataModule`.
    """

    def __init__(self, requests: int = 40, **options: Any) -> None:
        super().__init__(**{"batch_size": 16, "eval_negatives": 10, **options})
        self.requests = requests
        draw = torch.Generator().manual_seed(0)
        self.users = torch.randn(USERS, 3, generator=draw)
        vectors = torch.randn(ITEMS, 3, generator=draw)
        genres = torch.randint(0, GENRES + 1, (ITEMS, 2), generator=draw)  # 0 = an unused slot of the bag
        price = torch.rand(ITEMS, 1, generator=draw)
        ids = torch.arange(ITEMS)
        count = torch.randint(1, 5, (ITEMS,), generator=draw)
        self.items = Catalogue(
            100 + ids, torch.cat([1 + ids[:, None], genres], 1), count, torch.cat([price, vectors], 1)
        )

    @property
    def schema(self) -> Schema:
        return Schema(
            tables=(Table("user", USERS + 1), Table("item", ITEMS + 1), Table("genre", GENRES + 1)),
            request=(Feature("user", "user"), Feature("age", kind="numeric")),
            history=(Feature("item", "item"), Feature("seconds", kind="numeric")),
            items=(
                Feature("item", "item"),
                Feature("genres", "genre", "bag", 2),
                Feature("price", kind="numeric"),
                Feature("text", kind="vector", size=3),
            ),
            groups=("shown",),
        )

    def open_shard(self, name: str) -> Shard:
        start = ("train", "val", "test").index(name)
        draw = torch.Generator().manual_seed(start)
        user = torch.randint(0, USERS, (self.requests,), generator=draw)
        lists = torch.rand(self.requests, ITEMS, generator=draw).argsort(1)[:, :8]
        fit = (self.users[user][:, None] * self.items.values[lists, 1:]).sum(-1)
        seen = torch.randint(0, 5, (self.requests,), generator=draw)
        real = torch.arange(4) < seen[:, None]
        views = 1 + torch.randint(0, ITEMS, (self.requests, 4), generator=draw)
        empty = torch.rand(lists.shape, generator=draw) < 0.2
        return TensorShard(
            name,
            self.items,
            request_id=1000 * start + torch.arange(self.requests),
            lists=torch.where(empty, -1, lists),
            labels=(fit > 0.5).float(),
            request=1 + user[:, None],
            history=torch.where(real, views, 0)[..., None],
            history_length=real.sum(1),
            request_values=torch.rand(self.requests, 1, generator=draw),
            history_values=torch.where(real, 1.0, 0.0)[..., None],
        )
