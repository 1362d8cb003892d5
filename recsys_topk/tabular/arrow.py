"""Arrow files of numpy columns: written whole, memory-mapped for reading.

Prepared data are Arrow streams, which Hugging Face `datasets` opens too. Tables of an export are Arrow files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.types import Array

_WIDTH: Final = "width "


def table_of(
    columns: Mapping[str, Array],
    lists: Mapping[str, tuple[Array, Array]] | None = None,
    facts: Mapping[str, int] | None = None,
) -> pa.Table:
    """Return numpy columns as a pyarrow table of one chunk, so that each column is contiguous in a file.

    Args:
        columns: Arrays (n,) or (n, width); they may be memory-mapped. Of a column of width 0, only the width is kept.
        lists: Columns of lists, as flat values and the exclusive end of each list.
        facts: Integers to keep with the table.

    Example:
        >>> table = table_of({"ids": np.arange(4).reshape(2, 2), "values": np.empty((2, 0))}, facts={"views": 3})
        >>> {name: array.shape for name, array in columns_of(table).items()}, facts_of(table)["views"]
        ({'ids': (2, 2), 'values': (2, 0)}, 3)
    """
    arrays, kept = {}, dict(facts or {})
    for name, column in columns.items():
        if column.ndim == 2:
            kept[f"{_WIDTH}{name}"] = column.shape[1]
            if not column.shape[1]:
                continue
        flat = pa.array(np.ascontiguousarray(column).reshape(-1))
        arrays[name] = flat if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
    for name, (flat, ends) in (lists or {}).items():
        arrays[name] = pa.LargeListArray.from_arrays(pa.array(np.append(0, ends)), pa.array(flat))
    return pa.table(arrays).replace_schema_metadata({name: str(value) for name, value in kept.items()})


def columns_of(table: pa.Table) -> dict[str, Array]:
    """Return the columns of a table as arrays, without a copy where possible.

    A column of lists becomes two: the flat values, and the exclusive ends under its name and ``_ends``.
    """
    columns = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            columns[name] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
        elif pa.types.is_large_list(column.type):
            columns[name], columns[f"{name}_ends"] = column.values.to_numpy(), column.offsets.to_numpy()[1:]
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    for name, value in facts_of(table).items():
        if name.startswith(_WIDTH) and not value:
            columns[name.removeprefix(_WIDTH)] = np.empty((table.num_rows, 0), dtype=np.float32)
    return columns


def facts_of(table: pa.Table) -> dict[str, int]:
    """Return the integers that `table_of` kept with a table."""
    numbers = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    return {name: int(value) for name, value in numbers.items() if value.isdecimal()}


def write_columns(path: Path, columns: Mapping[str, Array]) -> None:
    """Write columns as an Arrow stream; see `table_of`."""
    write_stream(path, table_of(columns))


def write_ids(path: Path, ids: Sequence[Any]) -> None:
    """Write a column ``id`` of integers or strings; a missing id is None."""
    write_stream(path, pa.table({"id": pa.array(ids)}))


def write_stream(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow stream."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def write_file(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow file, to be read with `read_file`."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(table.num_rows, 1))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise an error that names the file, if its content is not that of a written table."""
    try:
        yield
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); copy or write it again") from error


def read_file(path: Path) -> pa.Table:
    """Memory-map an Arrow file."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()
