"""Look up rows of the user and item tables by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.tabular.tables.columns import id_column, keys_of
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.types import Array


class Lookup:
    """A table of users or items, indexed by key. Only the columns used by features are kept in memory.

    Args:
        reader: The table; None = there is no table, only the ids.
        key: The column of the ids.
        columns: The columns used by features.
        what: ``"users"`` or ``"items"``, for error messages.

    Attributes:
        ids: The ids of the table, a pyarrow array.
        keys: The keys of the ids, ascending.
    """

    def __init__(self, reader: TableReader | None, key: str, columns: Sequence[str], what: str) -> None:
        self.key, self.columns = key, list(columns)
        self.keys, self.ids = np.empty(0, dtype=np.int64), pa.nulls(0, pa.int64())
        self._table: Any = None
        self._name = "" if reader is None else reader.name
        if reader is None:
            wanted = [column for column in columns if column != key]
            if wanted:
                raise ValueError(
                    f"the description has the columns {', '.join(wanted)}, and there is no table of {what}; give one "
                    f"with --data.{what} FILE, or remove them from the description"
                )
            return
        reader.require([key, *columns])
        found = pa.Table.from_batches(list(reader.batches([key, *columns])))
        self.ids = column = id_column(found.column(key))
        keys = keys_of(column)
        if keys.missing.any():
            raise ValueError(f"{reader.name} has {int(keys.missing.sum())} rows without {key}; remove them")
        order = np.argsort(keys.keys, kind="stable")
        self.keys = keys.keys[order]
        twice = np.flatnonzero(self.keys[1:] == self.keys[:-1])
        if twice.size:
            example = column[int(order[twice[0]])].as_py()
            raise ValueError(
                f"{reader.name} has {twice.size} repeated rows, e.g. of {key} {example!r}; keep one row per {key}"
            )
        self._table = found.select([name for name in self.columns if name != key]).take(order)

    def check_known(self, keys: Array) -> None:
        """Raise if no id of the interactions is in the table, e.g. because ids are written in another format."""
        if self.keys.size and not np.isin(keys, self.keys).any():
            raise ValueError(
                f"none of the {keys.size} ids of the interactions is in column {self.key!r} of {self._name}; write ids "
                f"in the same way in both tables: 7 and '7' are the same id, '007' is another"
            )

    def rows(self, keys: Array) -> Any:
        """Return the rows of `keys` as a pyarrow table, in this order. Ids that are not in the table have nulls."""
        made: dict[str, Any] = {}
        if self._table is not None and self._table.num_columns:
            at = np.minimum(np.searchsorted(self.keys, keys), max(self.keys.size - 1, 0))
            absent = self.keys[at] != keys
            taken = self._table.take(pa.array(at, mask=absent))
            made = {name: taken.column(name) for name in taken.column_names}
        return pa.table(
            {
                name: made[name] if name in made else pa.array(keys)
                for name in {self.key: 0, **dict.fromkeys(self.columns)}
            }
        )
