"""Store equal rows once: the distinct rows of a table, and the number of each row, without sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

VARIANT: Final = 1 << 40
"""An item's id is its video id; a second, third, ... row of features of the same video adds multiples of this."""


def intern_columns(parts: Sequence[Array], size: int) -> tuple[Array, list[Array], Array]:
    """Return the distinct rows of tables held as columns, the row number of each row, and its variant of its key.

    The first column is the key, and nearly always settles the row: one scatter finds the first row of each key, one
    comparison the rows that differ from it, and only those are sorted. O(rows + size) time.

    Args:
        parts: (F, n_p) integer arrays, with keys in 0..size-1 in column 0.
        size: Number of possible keys.

    Returns:
        The distinct rows (F, U), by variant and then by key; for each part, (n_p,) row numbers; the variant of each
        distinct row, (U,) int64, 0 for the first row that a key occurs with.

    Example:
        >>> distinct, (number,), variant = intern_columns([np.array([[7, 3, 7, 7], [1, 5, 1, 2]])], 10)
        >>> distinct.T.tolist(), number.tolist(), variant.tolist()
        ([[3, 5], [7, 1], [7, 2]], [1, 0, 1, 2], [0, 0, 1])
    """
    table = np.concatenate(parts, axis=1)
    first = np.full(size, -1, dtype=np.int64)
    first[table[0, ::-1]] = np.arange(table.shape[1])[::-1]
    keys = np.flatnonzero(first >= 0)
    distinct = table[:, first[keys]]
    first[keys] = np.arange(keys.size)
    number = first[table[0]]
    variant = np.zeros(keys.size, dtype=np.int64)
    differs = np.zeros(table.shape[1], dtype=bool)
    for column, once in zip(table[1:], distinct[1:], strict=True):
        differs |= column != once[number]
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
