"""The items of a split, each stored once: distinct pairs of item and features, ordered by item id."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.prepare.engine.column_files import ColumnFiles
from recsys_topk.tabular.features.encoder import Encoded
from recsys_topk.tabular.ids.keys import mixed
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array

_CHUNK: Final = 1 << 16


class DistinctItems:
    """Collects the items of a split. Memory: 16 bytes per distinct row; features are written to disk.

    If rows of an item differ in their features (e.g. a changed price, or a score that depends on the request), they
    are variants of the item (`schema.VARIANT`). Rows are compared by 64-bit hashes.

    Args:
        grown: Stores the features.
        name: The name of the table in `grown`.
    """

    def __init__(self, grown: ColumnFiles, name: str) -> None:
        self._grown, self._name = grown, name
        self._known = np.empty(0, dtype=np.uint64)
        self._numbers = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._grown.length(f"{self._name}.key")

    def add(self, keys: Array, encoded: Encoded) -> Array:
        """Add rows and return their numbers. New rows are numbered in order of first occurrence."""
        digest = row_digests(keys, encoded)
        distinct, first, inverse = np.unique(digest, return_index=True, return_inverse=True)
        at = np.searchsorted(self._known, distinct)
        there = np.zeros(distinct.size, dtype=bool)
        there[at < self._known.size] = self._known[at[at < self._known.size]] == distinct[at < self._known.size]
        numbers = np.empty(distinct.size, dtype=np.int64)
        numbers[there] = self._numbers[at[there]]
        new = np.flatnonzero(~there)
        new = new[np.argsort(first[new], kind="stable")]  # the order of the rows
        numbers[new] = len(self) + np.arange(new.size)
        where = np.sort(new)
        self._known = np.insert(self._known, at[where], distinct[where])
        self._numbers = np.insert(self._numbers, at[where], numbers[where])
        self.append(keys[first[new]], Encoded(encoded.ids[first[new]], encoded.values[first[new]]))
        return numbers[inverse]

    def append(self, keys: Array, encoded: Encoded) -> Array:
        """Add rows that are all different and return their numbers."""
        start = len(self)
        self._grown.append(f"{self._name}.key", keys)
        self._grown.append(f"{self._name}.ids", encoded.ids.astype(np.int32))
        self._grown.append(f"{self._name}.values", encoded.values)
        return start + np.arange(keys.size)

    def keys(self) -> Array:
        """Return the key of each row."""
        return np.asarray(self._grown.column(f"{self._name}.key"))

    def finish(self, item_id: Array) -> tuple[Array, dict[str, Array]]:
        """Return the final position of each row, and the columns in that order: ids ascending, variants last.

        Args:
            item_id: The id of each row's item, in 0..VARIANT - 1.
        """
        order = np.lexsort((np.arange(item_id.size), item_id))
        ordered = item_id[order]
        opens = np.r_[True, ordered[1:] != ordered[:-1]] if ordered.size else np.empty(0, dtype=bool)
        place = np.arange(ordered.size)
        variant = place - np.maximum.accumulate(np.where(opens, place, 0))
        if variant.max(initial=0) >= (1 << 62) // VARIANT:
            raise ValueError(
                "an item has more than four million different rows of features; remove the feature that varies"
            )
        ids = ordered + variant * VARIANT
        final = np.argsort(ids, kind="stable")
        order, ids = order[final], ids[final]
        placed = np.empty_like(order)
        placed[order] = place
        columns = {"item_id": ids}
        for kind in ("ids", "values"):
            column = self._grown.column(f"{self._name}.{kind}")
            if np.array_equal(order, place):
                columns[kind] = column
                continue
            for start in range(0, order.size, _CHUNK):
                self._grown.append(f"{self._name}.sorted_{kind}", column[order[start : start + _CHUNK]])
            columns[kind] = self._grown.column(f"{self._name}.sorted_{kind}")
        return placed, columns


def row_digests(keys: Array, encoded: Encoded) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each row: its key, ids and values."""
    state = mixed(keys, 3)
    for column in encoded.ids.T:
        state = mixed((state ^ column.astype(np.int64).view(np.uint64)).view(np.int64), 4)
    for column in encoded.values.T:
        bits = np.ascontiguousarray(column + np.float32(0)).view(np.int32).astype(np.int64).view(np.uint64)
        state = mixed((state ^ bits).view(np.int64), 5)
    return state
