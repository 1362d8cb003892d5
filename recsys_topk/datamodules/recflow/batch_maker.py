"""Make batches from rows of a prepared day. Columns are gathered, without a loop over requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recsys_topk.datamodules.recflow.cache import PreparedDay
from recsys_topk.datamodules.recflow.layout import (
    BEST_LABEL,
    ORDERED_STAGES,
    REQUEST_FEATURES,
    SLOTS,
    Layout,
)
from recsys_topk.datamodules.shard import ShardBatch
from recsys_topk.types import Array


class BatchMaker:
    """Make batches of a layout. Cost: O(B (N + L)) time and memory, independent of the size of the day.

    Args:
        layout: The groups of a list and their labels.
        history_length: Maximum length of the history, L; the newest views are kept.
    """

    def __init__(self, layout: Layout, history_length: int) -> None:
        if history_length < 1:
            raise ValueError(f"history_length must be at least 1, got {history_length}")
        self.layout = layout
        self.history_length = history_length
        self._group = np.repeat(np.arange(len(layout.groups)), SLOTS)
        self._scratch = np.empty(0, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scratch": np.empty(0, dtype=np.int64)}

    def make(self, day: PreparedDay, rows: Array) -> ShardBatch:
        """Return the batch of some rows of a day, (B,) row numbers."""
        requests = day.requests
        request = np.stack(
            [requests[name][rows] for name in REQUEST_FEATURES], axis=1, dtype=np.int64, casting="unsafe"
        )
        history, length = self._history(day, rows)
        item, labels = self._lists(requests, rows)
        mask = item >= 0
        pool, candidates = self._pool(item, mask, len(day.item_rows))
        tensors = {
            "request_id": requests["request_id"][rows],
            "request": request,
            "history": history,
            "history_length": length,
            "item_id": day.catalogue["item_id"].take(pool),
            "items": day.item_rows.take(pool, axis=0).astype(np.int64),
            "candidates": candidates,
            "labels": labels,
            "mask": mask,
            "group": np.where(mask, self._group, -1),
        }
        made: dict[str, Any] = {name: torch.from_numpy(array) for name, array in tensors.items()}
        return ShardBatch(
            **made,
            shard=day.day,
            pool_rows=torch.from_numpy(day.first_rows.take(pool)),
        )

    def _lists(self, requests: dict[str, Array], rows: Array) -> tuple[Array, Array]:
        """Return catalogue rows (-1 for an empty slot) and labels (0 for an empty slot), both (B, N)."""
        item = np.empty((rows.size, self.layout.slots), dtype=np.int64)
        labels = np.empty(item.shape, dtype=np.float32)
        for number, group in enumerate(self.layout.groups):
            here = slice(number * SLOTS, (number + 1) * SLOTS)
            item[:, here] = requests[group.stage].take(rows, axis=0)
            if group.label is None:
                np.subtract(
                    BEST_LABEL, requests[ORDERED_STAGES[group.stage]][rows], out=labels[:, here], dtype=np.float32
                )
            else:
                labels[:, here] = group.label
        labels *= item >= 0
        return item, labels

    def _pool(self, item: Array, mask: Array, catalogue: int) -> tuple[Array, Array]:
        """Return the distinct catalogue rows of the lists, ascending, and the lists as indices into them.

        The pool has at least one row even if all lists are empty, because padding points at it.
        """
        if self._scratch.size < catalogue:
            self._scratch = np.empty(catalogue, dtype=np.int64)
        ordered = np.sort(item[mask].astype(np.int32)) if mask.any() else np.zeros(1, dtype=np.int32)
        pool = ordered[np.flatnonzero(np.diff(ordered, prepend=-1))].astype(np.int64)
        self._scratch[pool] = np.arange(pool.size)
        candidates = self._scratch.take(np.where(mask, item, pool[0]))
        return pool, candidates

    def _history(self, day: PreparedDay, rows: Array) -> tuple[Array, Array]:
        """Return the newest views (B, L, F_h), from oldest to newest, then padding; and their number."""
        stored = day.requests["history"]
        full = day.requests["history_length"][rows].astype(np.int64)
        length = np.minimum(full, self.history_length)
        if self.history_length == stored.shape[1]:
            view = stored.take(rows, axis=0)
        else:
            columns = np.arange(self.history_length)
            newest = np.minimum((full - length)[:, None] + columns, stored.shape[1] - 1)
            view = np.where(columns < length[:, None], stored[rows[:, None], newest], -1)
        return day.view_rows.take(view, axis=0, mode="wrap"), length
