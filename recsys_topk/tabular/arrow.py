"""Arrow files of numpy columns: streams that Hugging Face `datasets` opens too, written whole and memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.types import Array


def write_columns(path: Path, columns: Mapping[str, Array]) -> None:
    """Write columns as one record batch, so that each column is contiguous in the file.

    Args:
        path: The file.
        columns: Arrays (n,) or (n, width); they may be memory-mapped. Columns of width 0 are not written.
    """
    arrays = {}
    for name, column in columns.items():
        if column.ndim == 2 and not column.shape[1]:
            continue
        flat = pa.array(np.ascontiguousarray(column).reshape(-1))
        arrays[name] = flat if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
    write_stream(path, pa.table(arrays))


def write_ids(path: Path, ids: Sequence[Any]) -> None:
    """Write a column ``id`` of integers or strings; a missing id is None."""
    write_stream(path, pa.table({"id": pa.array(ids)}))


def write_stream(path: Path, table: Any) -> None:
    """Write a pyarrow table as an Arrow stream, to be read with `read_streams`."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def read_streams(paths: Iterable[Path]) -> Iterator[Any]:
    """Yield the record batches of memory-mapped Arrow streams, one file after the other. Missing files are skipped."""
    for path in paths:
        if path.is_file():
            with pa.memory_map(str(path)) as source:
                yield from pa.ipc.open_stream(source)


def columns_of(table: Any) -> dict[str, Array]:
    """Return the columns of a pyarrow table as arrays (n,) or (n, width), without a copy where possible."""
    columns = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if hasattr(column.type, "list_size"):
            columns[name] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return columns
