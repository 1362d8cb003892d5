"""Chunks of whole groups (users or requests): cut from a sorted stream of rows, and what is made of them as files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.tabular.tables.columns import one_chunk


def whole_groups(batches: Iterable[Any], group: str, rows: int) -> Iterator[Any]:
    """Yield tables of at least one group and, if a group is not larger, at most `rows` rows.

    The cuts depend on the rows alone, not on the sizes of the batches, so that the prepared files are the same with any
    number of threads.

    Args:
        batches: Record batches whose rows are sorted by the group.
        group: The column that identifies the group.
        rows: Maximum number of rows of a chunk with more than one group.

    Example:
        >>> batches = pa.table({"user": [1, 1, 1, 2, 3, 3]}).to_batches(max_chunksize=4)
        >>> [chunk.column("user").to_pylist() for chunk in whole_groups(batches, "user", 2)]
        [[1, 1, 1], [2], [3, 3]]
    """
    waiting: list[Any] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.num_rows
        if size > rows:
            *ready, left = _cut(pa.Table.from_batches(waiting), group, rows)
            yield from ready
            waiting, size = left.to_batches(), left.num_rows
    if size:
        yield from _cut(pa.Table.from_batches(waiting), group, rows)


def _cut(table: Any, group: str, rows: int) -> Iterator[Any]:
    """Yield chunks. The last one may continue in rows that are not in the table."""
    values = np.asarray(one_chunk(table.column(group)))
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]) + 1, values.size)
    at = 0
    while at < table.num_rows:
        fits = ends[(ends > at) & (ends <= at + rows)]
        end = int(fits[-1] if fits.size else ends[np.searchsorted(ends, at, side="right")])
        yield table.slice(at, end - at)
        at = end


@dataclass(frozen=True)
class ChunkWriter:
    """Makes chunks from a sorted stream of rows, as the content of files for `read_chunk`.

    Attributes:
        make: Takes a pyarrow table; returns named arrays, which may differ in length.
        kinds: The name and the type of each column; None = the type of the database.
        group: The column that identifies a group; it ascends.
        rows: See `whole_groups`.
    """

    make: Callable[[Any], Mapping[str, Any]]
    kinds: Mapping[str, Any]
    group: str
    rows: int

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the chunks: an Arrow stream of one row of lists, with the last group."""
        typed = (converted(batch, self.kinds) for batch in batches if batch.num_rows)
        for table in whole_groups(typed, self.group, self.rows):
            made = {}
            for name, column in self.make(table).items():
                values = one_chunk(column) if isinstance(column, pa.ChunkedArray) else pa.array(column)
                made[name] = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
            row, file = pa.record_batch(made), pa.BufferOutputStream()
            last = str(table.column(self.group)[-1].as_py())
            with pa.ipc.new_stream(file, row.schema.with_metadata({"last": last})) as stream:
                stream.write_batch(row)
            yield file.getvalue()


def read_chunk(path: Path) -> tuple[dict[str, Any], int]:
    """Memory-map what `ChunkWriter` made: pyarrow arrays by name, and the last group."""
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    columns = {name: table.column(name).chunk(0).flatten() for name in table.column_names}
    return columns, int(table.schema.metadata[b"last"])


def converted(batch: Any, kinds: Mapping[str, Any], source: str = "the database") -> Any:
    """Return a batch with other names and types; None = the type it has.

    Raises:
        ValueError: A column has another type, and cannot be converted.
    """
    columns = {}
    for (name, kind), column in zip(kinds.items(), batch.columns, strict=True):
        try:
            made = pa.nulls(len(column)) if kind == pa.null() and column.null_count == len(column) else column
            columns[name] = made if kind is None or made.type == kind else made.cast(kind, safe=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ValueError(
                f"column {name.removeprefix('.')!r} is {column.type} in {source} and {kind} before; make it one type"
            ) from None
    return pa.record_batch(columns)
