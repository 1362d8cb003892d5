"""Cut a sorted stream of rows into chunks of whole groups (users or requests)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.tabular.tables.columns import one_chunk
from recsys_topk.types import Array

_BUCKETS: Final = 1 << 14


def whole_groups(batches: Iterable[Any], group: Sequence[str], rows: int) -> Iterator[Any]:
    """Yield tables of at least one group and, if a group is not larger, at most `rows` rows.

    The cuts depend on the rows alone, not on the sizes of the batches, so that the prepared files are the same with any
    number of threads.

    Args:
        batches: Record batches whose rows are sorted by the group.
        group: The columns that identify the group.
        rows: Maximum number of rows of a chunk with more than one group.

    Example:
        >>> batches = pa.table({"user": [1, 1, 1, 2, 3, 3]}).to_batches(max_chunksize=4)
        >>> [chunk.column("user").to_pylist() for chunk in whole_groups(batches, ["user"], 2)]
        [[1, 1, 1], [2], [3, 3]]
    """
    waiting: list[Any] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.num_rows
        if size > rows:
            table = pa.Table.from_batches(waiting)
            *ready, left = _cut(table, _starts(table, group), rows)
            yield from ready
            waiting, size = left.to_batches(), left.num_rows
    if size:
        table = pa.Table.from_batches(waiting)
        yield from _cut(table, _starts(table, group), rows)


def _starts(table: Any, group: Sequence[str]) -> Array:
    changed = np.zeros(table.num_rows - 1, dtype=bool)
    for name in group:
        values = np.asarray(one_chunk(table.column(name)))
        changed |= values[1:] != values[:-1]
    return np.append(0, np.flatnonzero(changed) + 1)


def _cut(table: Any, starts: Array, rows: int) -> Iterator[Any]:
    """Yield chunks. The last one may continue in rows that are not in the table."""
    ends = np.r_[starts[1:], table.num_rows]
    at = 0
    while at < table.num_rows:
        fits = ends[(ends > at) & (ends <= at + rows)]
        end = int(fits[-1] if fits.size else ends[np.searchsorted(ends, at, side="right")])
        yield table.slice(at, end - at)
        at = end


def value_at(place: int, low: int, high: int, count: Callable[[int, int, int], Iterable[tuple[int, int]]]) -> int:
    """Return the integer at a place of a sorted column that an engine counts in buckets. It is exact.

    Args:
        place: The place, from 0.
        low: The smallest value.
        high: The largest value.
        count: Takes low, width and high; returns (value - low) // width and its count, for values from low to high.

    Example:
        >>> values = [3, 3, 5, 90_000]
        >>> def count(low, width, high):
        ...     buckets = [(value - low) // width for value in values if low <= value <= high]
        ...     return {bucket: buckets.count(bucket) for bucket in buckets}.items()
        >>> [value_at(place, 3, 90_000, count) for place in range(4)]
        [3, 3, 5, 90000]
    """
    while low < high:
        width = (high - low) // _BUCKETS + 1
        bucket, number = np.array(sorted(count(low, width, high)), dtype=np.int64).T
        at = int(np.searchsorted(np.cumsum(number), place, side="right"))
        place -= int(number[:at].sum())
        low += int(bucket[at]) * width
        high = min(low + width - 1, high)
    return int(low)
