"""Batches and catalogues from the columns of prepared tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from recsys_topk.datamodules.batch import NO_VALUES
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.shard import ShardBatch
from recsys_topk.types import Array


def gather(table: Mapping[str, Array], kind: str, rows: Array, dtype: Any) -> Array:
    """Return the given rows of the ids or values of a table, with width 0 if the table has none."""
    if kind not in table:
        return np.empty((rows.size, 0), dtype=dtype)
    return np.ascontiguousarray(table[kind][rows], dtype=dtype)


def pooled_batch(
    items: Mapping[str, Array], item: Array, mask: Array, places: Array | None, columns: Mapping[str, Array]
) -> ShardBatch:
    """Return a batch whose pool holds the distinct items of the lists, in the order of the item table.

    Args:
        items: The item table: ``item_id``, ``ids`` and ``values``.
        item: (B, N) rows of `items`.
        mask: (B, N) boolean, True = a real candidate.
        places: The catalogue row of each row of `items`; None = they are the same.
        columns: The other fields of the batch. Value columns may have width 0.
    """
    pool, inverse = np.unique(item[mask], return_inverse=True)
    pool = pool.astype(np.int64) if pool.size else np.zeros(1, dtype=np.int64)
    candidates = np.zeros(mask.shape, dtype=np.int64)
    candidates[mask] = inverse
    arrays: dict[str, Any] = {
        **columns,
        "item_id": items["item_id"][pool],
        "items": gather(items, "ids", pool, np.int64),
        "item_values": gather(items, "values", pool, np.float32),
        "candidates": candidates,
        "mask": mask,
        "pool_rows": pool if places is None else places[pool],
    }
    for name, array in arrays.items():
        empty = name.endswith("_values") and not array.shape[-1]
        arrays[name] = NO_VALUES if empty else torch.from_numpy(np.ascontiguousarray(array))
    return ShardBatch(**arrays)


def item_catalogue(
    items: Mapping[str, Array], rows: Array, count: Array, device: torch.device | str = "cpu"
) -> Catalogue:
    """Return a catalogue of some rows of an item table.

    Args:
        items: The item table: ``item_id``, ``ids`` and ``values``.
        rows: The rows, ordered by item id.
        count: How often each of these items occurs.
        device: The device of the catalogue.
    """
    ids, values = gather(items, "ids", rows, np.int32), gather(items, "values", rows, np.float32)
    item_id, features, counts = (torch.from_numpy(column) for column in (items["item_id"][rows], ids, count))
    return Catalogue(item_id, features, counts, torch.from_numpy(values) if values.shape[1] else NO_VALUES).to(device)
