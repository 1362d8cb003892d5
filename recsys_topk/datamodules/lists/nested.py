"""Flatten tables with one row per request and list columns into one row per (request, item)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys_topk.tabular.tables.columns import is_list, one_chunk
from recsys_topk.tabular.tables.reader import TableReader

ROW: Final = "row"
"""The column of row numbers, for tables without a request column."""

_HEAD: Final = 1000


def flat_rows(reader: TableReader, markers: Sequence[str], whole: Sequence[str]) -> TableReader:
    """Return a nested table as one row per item, and any other table unchanged.

    A table is nested if one of its `markers` is a list column. List columns that are as long as the marker in the
    first rows are flattened; any other column is repeated. The row numbers become the column ``row`` if there is no
    such column.

    Args:
        reader: The table.
        markers: Columns that hold one value per item: item, label, stage, position.
        whole: Columns that are never flattened, e.g. the history.
    """
    kinds = {field.name: field.type for field in reader.schema}
    marker = next((name for name in markers if name in kinds and is_list(kinds[name])), None)
    if marker is None:
        return reader
    head = reader.head(_HEAD)

    def lengths(table: Any, name: str) -> Any:
        return np.asarray(pc.list_value_length(one_chunk(table.column(name))).fill_null(0))

    expected = lengths(head, marker)
    apart = [name for name, kind in kinds.items() if is_list(kind) and name not in whole
             and (name in markers or np.array_equal(lengths(head, name), expected))]  # fmt: skip
    fields = [pa.field(name, kinds[name].value_type if name in apart else kinds[name]) for name in kinds]
    if ROW not in kinds:
        fields.append(pa.field(ROW, pa.int64()))

    def scan(source: TableReader, columns: list[str]) -> Any:
        done = source.first
        for batch in source.batches([*dict.fromkeys([marker, *(name for name in columns if name in kinds)])]):
            length = lengths(batch, marker)
            parent = np.repeat(np.arange(batch.num_rows), length)
            made = []
            for name in columns:
                if name not in kinds:
                    made.append(pa.array(done + parent))
                    continue
                column = one_chunk(batch.column(name))
                if name in apart:
                    wrong = np.flatnonzero(lengths(batch, name) != length)
                    if wrong.size:
                        raise ValueError(
                            f"{source.name}, row {done + wrong[0] + 1}: {name} has {lengths(batch, name)[wrong[0]]} "
                            f"elements and {marker} has {length[wrong[0]]}; lists of a row must have the same length"
                        )
                    made.append(pc.list_flatten(column))
                else:
                    made.append(column.take(pa.array(parent)))
            done += batch.num_rows
            yield pa.record_batch(made, names=list(columns))

    return reader.changed(pa.schema(fields), scan)
