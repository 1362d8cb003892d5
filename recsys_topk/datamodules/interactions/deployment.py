"""Items and users of prepared interactions, for an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from recsys_topk.datamodules.interactions.shard import InteractionsShard, PreparedInteractions
from recsys_topk.tabular.export_tables import ItemTable, UserTable, newest_rows, source_names
from recsys_topk.types import Array

_CHUNK: Final = 1 << 14


def interactions_items(prepared: PreparedInteractions) -> ItemTable:
    """Return all items with their ids of the source, in the order of the prepared files."""
    items = prepared.items
    number = len(items["item_id"])
    ids = items.get("ids", np.empty((number, 0), dtype=np.int32))
    return ItemTable(
        source_names(prepared.item_ids),
        ids,
        items.get("values", np.empty((number, 0), dtype=np.float32)),
        items["count"],
    )


def interactions_users(shards: Mapping[str, InteractionsShard], prepared: PreparedInteractions) -> UserTable:
    """Return the state of each user after the last known interaction of any split.

    The context is that of the user's newest request.

    Args:
        shards: The splits, oldest first.
        prepared: The prepared files.
    """
    users = prepared.users
    number = len(users["key"])
    requests = [prepared.table(name)["user"] for name in shards]
    any_shard = next(iter(shards.values()))
    parts: list[tuple[Array, ...]] = []
    for at in range(0, number, _CHUNK):
        here = slice(at, at + _CHUNK)
        ids, values, length = any_shard.views(users["start"][here], users["stop"][here])
        parts.append((ids.astype(np.int32), values, length))
    history, history_values, length = (np.concatenate(column) for column in zip(*parts, strict=True))
    request = {"ids": np.zeros((number, 0)), "values": np.zeros((number, 0))}
    for shard, rows, own in zip(shards.values(), newest_rows(requests), requests, strict=True):
        for kind, dtype in (("ids", np.int64), ("values", np.float32)):
            found = shard.request_features(kind, own[rows], rows, dtype)
            if request[kind].shape[1] != found.shape[1]:
                request[kind] = np.zeros((number, found.shape[1]), dtype=dtype)
            request[kind][own[rows]] = found
    stretches = [np.unique(prepared.events[a:b]) for a, b in zip(users["start"], users["stop"], strict=True)]
    return UserTable(
        names=source_names(prepared.user_ids),
        request=request["ids"],
        request_values=request["values"].astype(np.float32),
        history=history,
        history_length=length,
        history_values=history_values,
        seen=np.concatenate(stretches),
        seen_ends=np.cumsum([len(own) for own in stretches]),
    ).sorted()
