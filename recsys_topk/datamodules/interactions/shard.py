"""Shards of prepared interactions. Batches are gathered from memory-mapped columns, without a loop over requests."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.prepare.base import PreparedFiles
from recsys_topk.datamodules.prepare.shard import gather, item_catalogue, pooled_batch
from recsys_topk.datamodules.shard import Shard, ShardBatch
from recsys_topk.tabular.schema import Schema
from recsys_topk.types import Array


class PreparedInteractions(PreparedFiles):
    """The files of prepared interactions."""

    @property
    def users(self) -> dict[str, Array]:
        """Key and features of each user, and the range of the user's events (first, end)."""
        return self.table("users")

    @property
    def items(self) -> dict[str, Array]:
        """Ids, counts and features of the items."""
        return self.table("items")

    @property
    def events(self) -> Array:
        """The item of each event (a row of `items`), ordered by user and time."""
        return self.table("events")["item"]

    @cached_property
    def item_ids(self) -> Array:
        """The id of each item in the source: integers or strings."""
        found = self.ids("item-ids")
        return self.items["item_id"] if found is None else found

    @cached_property
    def user_ids(self) -> Array:
        """The id of each user in the source: integers or strings."""
        found = self.ids("user-ids")
        return self.users["key"] if found is None else found


class InteractionsShard(Shard):
    """A split of prepared interactions. Cost of a batch: O(B (N + L)) plus sorting the B N listed items.

    The catalogue of the training split holds the items that occur in it. The other catalogues hold all items.

    Args:
        name: ``"train"``, ``"val"`` or ``"test"``.
        prepared: The prepared files.
        schema: The description of the columns.
        history_length: Maximum length of the history, L; the newest events are kept.
        repeats: Whether an item that the user had before is a candidate.
    """

    def __init__(
        self, name: str, prepared: PreparedInteractions, schema: Schema, history_length: int, repeats: bool
    ) -> None:
        super().__init__(name)
        self.prepared = prepared
        self.schema = schema
        self.history_length = history_length
        self.repeats = repeats

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "prepared", "schema", "history_length", "repeats")
        return {name: self.__dict__[name] for name in kept}

    def __len__(self) -> int:
        return len(self._requests["user"])

    @property
    def list_length(self) -> int:
        """The largest number of positives of a request."""
        return int(np.diff(self._requests["ends"], prepend=0).max())

    def batch(self, rows: Array) -> ShardBatch:
        """Return some requests. The pool holds the distinct items of their lists, in the order of the catalogue."""
        rows = np.asarray(rows)
        return self.with_histories(rows, self.views(self._requests["start"][rows], self._requests["stop"][rows]))

    def with_histories(self, rows: Array, histories: tuple[Array, Array, Array]) -> ShardBatch:
        """Return some requests with the given histories: ids, values and lengths, as from `views`."""
        requests, positives = self._requests, self.prepared.table(f"{self.name}-positives")
        history, history_values, length = histories
        ends = requests["ends"]
        first = np.where(rows > 0, ends[rows - 1], 0)
        mask = np.arange(self._length) < (ends[rows] - first)[:, None]
        at = np.where(mask, first[:, None] + np.arange(self._length), 0)
        user = requests["user"][rows]
        columns = {
            "request_id": requests["request_id"][rows],
            "request": self.request_features("ids", user, rows, np.int64),
            "request_values": self.request_features("values", user, rows, np.float32),
            "history": history,
            "history_values": history_values,
            "history_length": length,
            "labels": np.where(mask, positives["weight"][at], 0).astype(np.float32),
            "group": np.where(mask, 0, -1),
        }
        return pooled_batch(self.prepared.items, positives["item"][at], mask, self._places, columns)

    def users(self, rows: Array) -> Array:
        """Return the user ids of the source."""
        found: Array = self.prepared.user_ids[self._requests["user"][rows]]
        return found

    def catalogue(self, device: torch.device | str = "cpu") -> Catalogue:
        """Return the catalogue: the items of the training data, or all items."""
        items = self.prepared.items
        chosen = np.arange(len(items["count"])) if self._places is None else np.flatnonzero(items["count"])
        return item_catalogue(items, chosen, items["count"][chosen], device)

    def excluded(self, rows: Array) -> Tensor | None:
        """Return the items that are not candidates, as rows of the catalogue.

        These are the items that the user had before (in training, all items of the user's training data), unless they
        may be repeated, and the other items of the user at the time of a positive.
        """
        repeated = self.repeats and self._places is None
        ends = np.maximum(self._requests["seen"][rows], self._requests["tied"][rows])
        return self._items_between(self._requests["stop" if repeated else "start"][rows], ends)

    def earlier(self, rows: Array) -> Tensor:
        """Return all items of the user before each request, oldest first."""
        return self._items_between(self._requests["start"][rows], self._requests["stop"][rows])

    def _items_between(self, start: Array, stop: Array, chosen: Array | None = None) -> Tensor:
        """Return the items of event ranges (only of `chosen` events), as rows of the catalogue, with padding."""
        width = int((stop - start).max(initial=0))
        at = start[:, None] + np.arange(width)
        there = at < stop[:, None]
        if chosen is not None:
            there &= chosen[np.where(there, at, 0)]
        item = self.prepared.events[np.where(there, at, 0)].astype(np.int64)
        return torch.from_numpy(np.where(there, item if self._places is None else self._places[item], -1))

    def sequences(self, held_out: bool = True) -> tuple[Array, Array]:
        """See `Shard.sequences`."""
        user, at = self._training_events(held_out)
        return user, self.prepared.items["item_id"][self.prepared.events[at]]

    def times(self, held_out: bool = True) -> Array | None:
        """See `Shard.times`."""
        time = self.prepared.table("events").get("time") if self.prepared.facts.get("split") == "time" else None
        return None if time is None else time[self._training_events(held_out)[1]]

    def _training_events(self, held_out: bool) -> tuple[Array, Array]:
        """Return the user of each interaction of `sequences`, and its row in the events."""
        start, first = np.unique(self._requests["start"], return_index=True)
        length = self._requests["seen"][first] - start  # in training, `seen` ends after the user's last interaction
        row = np.repeat(np.arange(start.size), length)
        at = np.arange(row.size) + (start - np.cumsum(length) + length)[row]
        return self._requests["user"][first][row], at

    @cached_property
    def _length(self) -> int:
        return self.list_length

    @property
    def _requests(self) -> dict[str, Array]:
        return self.prepared.table(self.name)

    @cached_property
    def _places(self) -> Array | None:
        """The row of each item in the training catalogue, -1 if it is not there; None = all items are there."""
        if self.name != "train":
            return None
        there = self.prepared.items["count"] > 0
        return np.where(there, np.cumsum(there) - 1, -1)

    @cached_property
    def _views(self) -> tuple[Array, Array]:
        """Ids and values of the history features of each item, and a last row for padding."""
        schema, items = self.schema, self.prepared.items
        found = []
        for kind, dtype in (("ids", np.int64), ("values", np.float32)):
            columns = getattr(schema, f"{kind[:-1]}_columns")
            own = columns("items")
            names = [name for name in columns("history") if name in own]  # without the age, which is not of the item
            chosen = [i for name in names for i in range(own[name].start, own[name].stop)]
            block = np.zeros((len(items["item_id"]) + 1, len(chosen)), dtype=dtype)
            if chosen:
                block[:-1] = items[kind][:, chosen]
            found.append(block)
        return found[0], found[1]

    def views(self, start: Array, stop: Array) -> tuple[Array, Array, Array]:
        """Return the newest events of some event ranges: ids and values, (B, L, columns), and the number of events.

        Events are ordered from oldest to newest, followed by padding.
        """
        length = np.minimum(stop - start, self.history_length)
        steps = np.arange(self.history_length)
        there = steps < length[:, None]
        at = np.where(there, (stop - length)[:, None] + steps, 0)
        history = np.where(there, self.prepared.events[at], -1)
        values = self._views[1][history]
        if self.schema.has_ages:
            time = self.prepared.table("events")["time"]
            ages = (time[np.maximum(stop - 1, 0)][:, None] - time[at]) / 1e6  # times are in microseconds
            values = np.concatenate([values, np.where(there, ages, 0.0).astype(np.float32)[..., None]], axis=2)
        return self._views[0][history], values, length

    def request_features(self, kind: str, user: Array, rows: Array, dtype: Any) -> Array:
        """Return the features of the users, followed by those of the contexts."""
        own = gather(self.prepared.users, kind, user, dtype)
        return np.concatenate([own, gather(self._requests, kind, rows, dtype)], axis=1)
