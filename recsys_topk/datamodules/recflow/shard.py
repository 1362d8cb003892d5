"""Shards of RecFlow: one per prepared day."""

from __future__ import annotations

import numpy as np
import torch

from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.recflow.batch_maker import BatchMaker
from recsys_topk.datamodules.recflow.cache import PreparedDay
from recsys_topk.datamodules.recflow.layout import stored_offset
from recsys_topk.datamodules.shard import Shard, ShardBatch
from recsys_topk.types import Array


class DayShard(Shard):
    """A prepared day, with lists in one layout.

    Args:
        day: The day.
        maker: Makes the batches.
    """

    def __init__(self, day: PreparedDay, maker: BatchMaker) -> None:
        super().__init__(day.day)
        self.day = day
        self.maker = maker

    def __len__(self) -> int:
        return len(self.day)

    @property
    def list_length(self) -> int:
        """Number of columns of the layout."""
        return self.maker.layout.slots

    @property
    def order_key(self) -> int:
        """The date as a number, e.g. 20240113."""
        return int(self.name.replace("-", ""))

    def batch(self, rows: Array) -> ShardBatch:
        """Return some requests of the day."""
        return self.maker.make(self.day, rows)

    def users(self, rows: Array) -> Array:
        """Return `user_id` as in the files."""
        stored: Array = self.day.stored_requests["user_id"][rows].astype(np.int64)
        return stored - stored_offset("user_id")

    def catalogue(self, device: torch.device | str = "cpu") -> Catalogue:
        """Return the items of the day. If an item has several rows of features, the first is used."""
        day = self.day
        items = int(day.first_rows.max(initial=-1)) + 1
        count = np.bincount(day.first_rows, weights=day.catalogue["count"], minlength=items).astype(np.int64)
        columns = (day.catalogue["item_id"][:items].copy(), day.item_rows[:items], count)
        return Catalogue(*map(torch.from_numpy, columns)).to(device)

    def release(self) -> None:
        """Free the tables of items and views."""
        self.day.release()
