"""Shards of prepared lists."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.prepare.base import PreparedFiles
from recsys_topk.datamodules.prepare.shard import gather, item_catalogue, pooled_batch
from recsys_topk.datamodules.shard import Shard, ShardBatch
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array


class PreparedLists(PreparedFiles):
    """The files of prepared lists."""

    @cached_property
    def item_ids(self) -> Array | None:
        """The item ids of the source, indexed by the item id in batches; None = both are the same."""
        return self.ids("item-ids")

    def request_ids(self, split: str) -> Array | None:
        """Return the ids of a split's requests in the source, in order; None = they are integers."""
        return self.ids(f"{split}-request-ids")

    def user_ids(self, split: str) -> Array | None:
        """Return the user id in the source of each request of a split, in order; None = there are no users."""
        return self.ids(f"{split}-user-ids")


class ListsShard(Shard):
    """A split of prepared lists. Cost of a batch: O(B (N + L)) plus sorting the B N listed items.

    Args:
        name: ``"train"``, ``"val"`` or ``"test"``.
        prepared: The prepared files.
        history_length: Maximum length of the history, L; the newest views are kept. 0 = no history.
    """

    def __init__(self, name: str, prepared: PreparedLists, history_length: int) -> None:
        super().__init__(name)
        self.prepared, self.history_length = prepared, history_length

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("name", "prepared", "history_length")}

    def __len__(self) -> int:
        return len(self._requests["request_id"])

    @cached_property
    def list_length(self) -> int:
        """The length of the longest list."""
        return int(self._requests["length"].max())

    def batch(self, rows: Array) -> ShardBatch:
        """Return some requests. The pool holds the distinct items of their lists, in the order of the catalogue."""
        requests, listed = self._requests, self.prepared.table(f"{self.name}-rows")
        steps = np.arange(self.list_length)
        mask = steps < requests["length"][rows][:, None]
        at = np.where(mask, requests["start"][rows][:, None] + steps, 0)
        history, length = self._history(rows)
        columns = {
            "request_id": requests["request_id"][rows],
            "request": gather(requests, "ids", rows, np.int64),
            "request_values": gather(requests, "values", rows, np.float32),
            "history": history,
            "history_length": length,
            "labels": np.where(mask, listed["label"][at], 0).astype(np.float32),
            "group": np.where(mask, listed["group"][at], -1).astype(np.int64),
        }
        return pooled_batch(self._items, listed["item"][at], mask, self._first_rows, columns)

    def users(self, rows: Array) -> Array | None:
        """Return the user ids of the source. If a request has no user: strings, and None for that request."""
        return None if self._users is None else self._users[rows]

    def catalogue(self, device: torch.device | str = "cpu") -> Catalogue:
        """Return the items of the split. If an item has several rows of features, the first is used."""
        items, first = self._items, self._first_rows
        number = int(first.max(initial=-1)) + 1
        count = np.bincount(first, weights=items["count"], minlength=number).astype(np.int64)
        return item_catalogue(items, np.arange(number), count, device)

    @cached_property
    def _users(self) -> Array | None:
        users = self.prepared.user_ids(self.name)
        if users is None or users.dtype.kind in "iuU" or all(isinstance(user, str) for user in users):
            return users
        return np.array([_user_text(user) for user in users.tolist()], dtype=object)

    @property
    def _requests(self) -> dict[str, Array]:
        return self.prepared.table(self.name)

    @property
    def _items(self) -> dict[str, Array]:
        return self.prepared.table(f"{self.name}-items")

    @cached_property
    def _first_rows(self) -> Array:
        """For each row of the items, the first row of the same item; differs from the row only for variants."""
        item_id = self._items["item_id"]
        return np.searchsorted(item_id[: np.searchsorted(item_id, VARIANT)], item_id % VARIANT)

    @cached_property
    def _views(self) -> Array:
        """The ids of all views, and a last row for padding."""
        views = self.prepared.table(f"{self.name}-views").get("ids")
        width = len(self.prepared.encoder.description.history)
        views = np.empty((0, width), dtype=np.int32) if views is None else views
        return np.concatenate([views, np.zeros((1, views.shape[1]), dtype=views.dtype)])

    def _history(self, rows: Array) -> tuple[Array, Array]:
        """Return the ids of the newest views, (B, L, F_h), from oldest to newest, then padding; and their number."""
        if not self.history_length:
            return np.empty((rows.size, 0, 0), dtype=np.int64), np.zeros(rows.size, dtype=np.int64)
        full = self._requests["view_length"][rows]
        length = np.minimum(full, self.history_length)
        steps = np.arange(self.history_length)
        newest = (self._requests["view_start"][rows] + full - length)[:, None] + steps
        return self._views[np.where(steps < length[:, None], newest, -1)].astype(np.int64), length.astype(np.int64)


def _user_text(user: Any) -> str | None:
    """Return a user as a string; integers are stored as floats if some users are missing."""
    if user is None or user != user:
        return None
    return str(int(user)) if isinstance(user, float) and user.is_integer() else str(user)
