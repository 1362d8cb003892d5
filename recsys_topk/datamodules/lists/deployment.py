"""Items and users of prepared lists, for an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recsys_topk.datamodules.lists.plan import SPLITS
from recsys_topk.datamodules.lists.shard import ListsShard, PreparedLists
from recsys_topk.datamodules.prepare.shard import gather
from recsys_topk.tabular.export_tables import ItemTable, UserTable
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array


def lists_items(prepared: PreparedLists) -> ItemTable:
    """Return the items of all splits, each with its features in the newest request that has it."""
    parts = []
    for split in SPLITS:
        requests, listed, items = (prepared.table(name) for name in (split, f"{split}-rows", f"{split}-items"))
        length, item = requests["length"], items["item_id"] % VARIANT
        inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        last = np.empty(len(item), dtype=np.int64)
        last[listed["item"][np.repeat(requests["start"], length) + inside]] = np.arange(inside.size)
        rows = _last_of(item, last)
        parts.append((
            item[rows],
            gather(items, "ids", rows, np.int32),
            gather(items, "values", rows, np.float32),
            np.bincount(np.searchsorted(item[rows], item), weights=items["count"]).astype(np.int64),
            np.repeat(requests["time"], length)[last[rows]],
        ))  # fmt: skip
    *columns, time = (np.concatenate(column) for column in zip(*parts, strict=True))
    newest = _last_of(columns[0], time)
    return ItemTable(*(column[newest] for column in columns))


def _last_of(item: Array, time: Array) -> Array:
    """Return the row of the largest time of each item, by item; the last row if times are equal."""
    order = np.lexsort((time, item))
    return np.asarray(order[np.r_[item[order][1:] != item[order][:-1], True]])


def lists_users(shards: Mapping[str, ListsShard], prepared: PreparedLists, items: ItemTable) -> UserTable | None:
    """Return the newest request of each user, or None if there is no user column.

    The items that a user had before are the history of that request.

    Args:
        shards: The splits, oldest first.
        prepared: The prepared files.
        items: The catalogue, with the item ids of the source.
    """
    newest = _newest({split: prepared.user_ids(split) for split in shards}, prepared)
    if not newest:
        return None
    parts, lists = [], []
    for split, shard in shards.items():
        own = [(name, row) for name, (_, where, row) in newest.items() if where == split]
        rows = np.array([row for _, row in own], dtype=np.int64)
        batch = shard.batch(rows)
        number = len(rows)
        # A part without numeric features has a tensor of shape (0, 0).
        request_values, history_values = (
            values.numpy() if values.numel() else np.empty((*shape, 0), dtype=np.float32)
            for values, shape in (
                (batch.request_values, (number,)),
                (batch.history_values, (number, batch.history.shape[1])),
            )
        )
        parts.append(
            (
                np.array([name for name, _ in own]),
                batch.request.numpy(),
                request_values,
                batch.history.numpy(),
                batch.history_length.numpy(),
                history_values,
            )
        )
        lists += _seen(split, rows, prepared, items)
    names, request, request_values, history, length, history_values = (
        np.concatenate(column) for column in zip(*[part for part in parts if len(part[0])], strict=True)
    )
    ends = np.cumsum([len(seen) for seen in lists], dtype=np.int64)
    seen = np.concatenate(lists)
    return UserTable(names, request, request_values, history, length, history_values, seen, ends).sorted()


def _newest(users: Mapping[str, Array | None], prepared: PreparedLists) -> dict[Any, tuple[int, str, int]]:
    """Return time, split and row of the newest request of each user; the last one if times are equal."""
    newest: dict[Any, tuple[int, str, int]] = {}
    for split, names in users.items():
        if names is None:
            continue
        times = prepared.table(split)["time"].tolist()
        for row, (name, time) in enumerate(zip(names.tolist(), times, strict=True)):
            if name is not None and name == name and (name not in newest or time >= newest[name][0]):
                newest[name] = (time, split, row)
    return newest


def _seen(split: str, rows: Array, prepared: PreparedLists, items: ItemTable) -> list[Array]:
    requests = prepared.table(split)
    if "view_start" not in requests:
        return [np.empty(0, dtype=np.int64)] * len(rows)
    viewed = prepared.table(f"{split}-views")["item"]
    stretches = zip(requests["view_start"][rows], requests["view_length"][rows], strict=True)
    own = [viewed[start : start + length] for start, length in stretches]
    names = prepared.item_ids
    found = [items.index.rows(one[one >= 0] if names is None else names[one[one >= 0]].astype(str)) for one in own]
    return [np.unique(one[one >= 0]) for one in found]
