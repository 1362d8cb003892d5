"""Tables of users and items, found by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.columns import keys_of, one_chunk
from recsys_topk.datamodules.interactions.spill import RawIds
from recsys_topk.datamodules.reading import TableReader

Array = npt.NDArray[Any]


class Lookup:
    """A table of users or items by key. Held in memory, the columns that features are made of.

    Args:
        reader: The table; None = there is none, and the id is all that is known.
        key: The column of the ids.
        columns: The columns that features are made of.
        what: ``"users"`` or ``"items"``, for messages.

    Attributes:
        ids: The ids of the table.
        keys: Their keys, ascending.
    """

    def __init__(self, reader: TableReader | None, key: str, columns: Sequence[str], what: str) -> None:
        import pyarrow as pa

        self.key, self.columns, self.ids = key, list(columns), RawIds()
        self.keys = np.empty(0, dtype=np.int64)
        self._table: Any = None
        self._name = "" if reader is None else reader.name
        if reader is None:
            wanted = [column for column in columns if column != key]
            if wanted:
                raise ValueError(
                    f"feature columns {', '.join(wanted)} are described and there is no table of {what}; give one with "
                    f"--data.{what} FILE, or take them out of the description"
                )
            return
        reader.require([key, *columns])
        found = pa.Table.from_batches(list(reader.batches([key, *columns])))
        column = one_chunk(found.column(key))
        keys = keys_of(column)
        if keys.missing.any():
            raise ValueError(f"{reader.name} has {int(keys.missing.sum())} rows without {key}; remove them")
        self.ids.add(column, keys)
        order = np.argsort(keys.keys, kind="stable")
        self.keys = keys.keys[order]
        twice = np.flatnonzero(self.keys[1:] == self.keys[:-1])
        if twice.size:
            example = column[int(order[twice[0]])].as_py()
            raise ValueError(
                f"{reader.name} has {twice.size} rows too many: {key} {example!r} is there twice; "
                f"keep one row per {key}"
            )
        self._table = found.select([name for name in self.columns if name != key]).take(order)

    def check_known(self, keys: Array) -> None:
        """Raise if the table has none of the ids of the interactions: they are written differently."""
        if self.keys.size and not np.isin(keys, self.keys).any():
            raise ValueError(
                f"none of the {keys.size} ids of the interactions is in column {self.key!r} of {self._name}; write "
                f"them alike: 7 and '7' are one id, '007' is another"
            )

    def rows(self, keys: Array) -> Any:
        """Return the columns of some ids as a pyarrow table, in this order; nulls where the table has no such id."""
        import pyarrow as pa

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
