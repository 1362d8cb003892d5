"""Deduplicate the rows of a table without sorting: return the distinct rows, and the number of each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from recsys_topk.types import Array


def row_keys(columns: Iterable[Array]) -> Array:
    """Return a 64-bit hash of each row of integer columns, (n,) uint64."""
    key: Array = np.zeros(1, dtype=np.uint64)
    for column in columns:
        key = (key ^ np.asarray(column, dtype=np.int64).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def intern_columns(parts: Sequence[Array], size: int) -> tuple[Array, list[Array], Array]:
    """Return the distinct rows of tables held as columns, the number of each row, and the variant within its key.

    The first column is the key. Most rows with equal keys are equal. One scatter finds the first row of each key, and
    one comparison finds the rows that differ from it. Only these are sorted. O(rows + size) time.

    Args:
        parts: (F, n_p) integer arrays, with keys in 0..size-1 in column 0.
        size: Number of possible keys.

    Returns:
        The distinct rows (F, U), by variant and then by key; (n_p,) row numbers for each part; the variant of each
        distinct row, (U,) int64, 0 for the first row of a key.

    Example:
        >>> distinct, (number,), variant = intern_columns([np.array([[7, 3, 7, 7], [1, 5, 1, 2]])], 10)
        >>> distinct.T.tolist(), number.tolist(), variant.tolist()
        ([[3, 5], [7, 1], [7, 2]], [1, 0, 1, 2], [0, 0, 1])
    """
    table = np.concatenate(parts, axis=1)
    first = np.full(size, -1, dtype=np.int32)
    first[table[0, ::-1]] = np.arange(table.shape[1], dtype=np.int32)[::-1]
    keys = np.flatnonzero(first >= 0)
    chosen = first[keys]
    distinct = table[:, chosen]
    first[keys] = np.arange(keys.size, dtype=np.int32)
    number = first.take(table[0])
    variant = np.zeros(keys.size, dtype=np.int64)
    differs = np.zeros(table.shape[1], dtype=bool)
    for word in _packed(table[1:]):
        differs |= word != word[chosen].take(number)
    other = np.flatnonzero(differs)
    if other.size:
        more, inverse = np.unique(table[:, other], axis=1, return_inverse=True)
        place = np.arange(more.shape[1])
        starts = np.r_[True, more[0, 1:] != more[0, :-1]]
        run = place - np.maximum.accumulate(np.where(starts, place, 0)) + 1
        order = np.lexsort((more[0], run))
        sorted_place = np.empty_like(order)
        sorted_place[order] = place
        number[other] = keys.size + sorted_place[inverse.ravel()]
        distinct = np.concatenate([distinct, more[:, order]], axis=1)
        variant = np.concatenate([variant, run[order]])
    return distinct, np.split(number, np.cumsum([part.shape[1] for part in parts])[:-1]), variant


def _packed(columns: Array) -> list[Array]:
    """Return non-negative columns packed into as few int64 words as possible, to compare rows."""
    words: list[Array] = []
    free = 0
    for column in columns:
        bits = int(column.max(initial=0)).bit_length()
        if not words or bits > free:
            words.append(column.astype(np.int64))
            free = 63 - bits
        else:
            words[-1] <<= bits
            words[-1] |= column
            free -= bits
    return words
