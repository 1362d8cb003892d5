"""The tables of items and users that a data module exports, as memory-mapped Arrow files. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.tabular.arrow import columns_of, facts_of, naming, read_file, table_of, write_file
from recsys_topk.types import Array

ITEMS: Final = "items.arrow"
USERS: Final = "users.arrow"


class Names:
    """Finds the row of an item or user by its name in the source.

    Args:
        names: (n,) integers or strings, all distinct.

    Example:
        >>> names = Names(np.array(["b", "a"]))
        >>> names.rows(["a", "zebra", "b"]).tolist()
        [1, -1, 0]
    """

    def __init__(self, names: Array) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @property
    def are_integers(self) -> bool:
        """Whether the names are integers."""
        return bool(np.issubdtype(self.names.dtype, np.integer))

    @cached_property
    def _order(self) -> tuple[Array, Array] | None:
        """The names in ascending order and their rows, or None if `names` is already in ascending order."""
        if len(self.names) < 2 or bool((self.names[1:] > self.names[:-1]).all()):
            return None
        order = np.argsort(self.names, kind="stable")
        return self.names[order], order

    def rows(self, wanted: Any) -> npt.NDArray[np.int64]:
        """Return the row of each name, -1 for unknown names. Integers may be given as text and vice versa."""
        asked = self._as_names(wanted)
        known = np.ones(len(asked), dtype=np.bool_)
        if isinstance(asked, list):
            known = np.array([one is not None for one in asked], dtype=np.bool_)
            asked = np.array([0 if one is None else one for one in asked], dtype=self.names.dtype)
        names, order = (self.names, None) if self._order is None else self._order
        if not len(names):
            return np.full(len(asked), -1, dtype=np.int64)
        place = np.minimum(np.searchsorted(names, asked), len(names) - 1)
        found = place if order is None else order[place]
        return np.where(known & (names[place] == asked), found, -1).astype(np.int64)

    def _as_names(self, wanted: Any) -> Any:
        given = np.asarray(wanted)
        if self.are_integers:
            if np.issubdtype(given.dtype, np.integer):
                return given
            limits = np.iinfo(self.names.dtype)
            numbers = (as_integer(one) for one in np.asarray(wanted, dtype=object).ravel())
            return [one if one is not None and limits.min <= one <= limits.max else None for one in numbers]
        return given.astype(str) if given.dtype.kind != "U" else given


def as_integer(value: Any) -> int | None:
    """Return a name as an integer, given a number or the usual decimal text of one (not "007"); else None."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if value == (str(number) if isinstance(value, str) else number) else None


@dataclass(frozen=True)
class ItemTable:
    """The encoded features of all items.

    Attributes:
        names: (C,) names of the items in the source.
        ids: (C, F_i) integers, as in `CascadeBatch.items`.
        values: (C, V_i) float32, as in `CascadeBatch.item_values`.
        count: (C,) number of occurrences of each item in the data.
    """

    names: Array
    ids: Array
    values: Array
    count: Array

    def write(self, path: Path) -> None:
        """Write an Arrow file that `read` maps."""
        columns = {"name": self.names, "ids": _narrow(self.ids), "values": self.values, "count": self.count}
        write_file(path, table_of(columns))

    @classmethod
    def read(cls, path: Path) -> ItemTable:
        """Memory-map a file of `write`. Only names that are strings are copied."""
        with naming(path):
            columns = columns_of(read_file(path))
            return cls(source_names(columns["name"]), columns["ids"], columns["values"], columns["count"])

    @cached_property
    def index(self) -> Names:
        """The rows of the items by name."""
        return Names(self.names)


@dataclass(frozen=True)
class UserTable:
    """The encoded features and history of each user, in the newest state.

    Attributes:
        names: (U,) names of the users in the source.
        request: (U, F_r) integers, as in `CascadeBatch.request`.
        request_values: (U, V_r) float32.
        history: (U, L, F_h) integers, padding last.
        history_length: (U,) integers.
        history_values: (U, L, V_h) float32.
        seen: (S,) item rows of all interactions, ordered by user.
        seen_ends: (U,) end (exclusive) of each user's items in `seen`.
    """

    names: Array
    request: Array
    request_values: Array
    history: Array
    history_length: Array
    history_values: Array
    seen: Array
    seen_ends: Array

    def write(self, path: Path) -> None:
        """Write an Arrow file that `read` maps."""
        columns = {
            "name": self.names,
            "request": _narrow(self.request),
            "request_values": self.request_values,
            "history": _narrow(self.history).reshape(len(self.names), -1),
            "history_length": self.history_length,
            "history_values": self.history_values.reshape(len(self.names), -1),
        }
        seen = (_narrow(self.seen), self.seen_ends)
        write_file(path, table_of(columns, {"seen": seen}, {"views": self.history.shape[1]}))

    @classmethod
    def read(cls, path: Path) -> UserTable:
        """Memory-map a file of `write`."""
        with naming(path):
            table = read_file(path)
            columns, views = columns_of(table), facts_of(table)["views"]
            number = len(columns["name"])
            for field in ("history", "history_values"):
                columns[field] = columns[field].reshape(number, views, -1) if views else columns[field][:, None][:, :0]
            return cls(names=source_names(columns.pop("name")), **columns)

    @cached_property
    def index(self) -> Names:
        """The rows of the users by name."""
        return Names(self.names)

    def seen_of(self, row: int) -> Array:
        """Return the rows of the items that a user has already interacted with."""
        start = self.seen_ends[row - 1] if row else 0
        return self.seen[start : self.seen_ends[row]]

    def sorted(self) -> UserTable:
        """Return the table sorted by name."""
        order = np.argsort(self.names, kind="stable")
        kept = {
            field.name: getattr(self, field.name)[order] for field in fields(self) if not field.name.startswith("seen")
        }
        lists = [self.seen_of(row) for row in order.tolist()]
        ends = np.cumsum([len(own) for own in lists], dtype=np.int64)
        return UserTable(**kept, seen=np.concatenate([self.seen[:0], *lists]), seen_ends=ends)


def newest_rows(names: Sequence[Array]) -> list[Array]:
    """Return the rows of each array that are the newest row of their name, given several arrays, oldest first.

    Example:
        >>> [rows.tolist() for rows in newest_rows([np.array([1, 2, 1]), np.array([2])])]
        [[2], [0]]
    """
    found: list[Array] = []
    later = np.empty(0, dtype=np.asarray(names[-1]).dtype if len(names) else np.int64)
    for own in reversed(names):
        distinct, last = np.unique(own[::-1], return_index=True)
        new = ~np.isin(distinct, later)
        found.append(np.sort(len(own) - 1 - last[new]))
        later = np.concatenate([later, distinct[new]])
    return found[::-1]


def _narrow(column: Array) -> Array:
    """Return a column of integers as int32 if all values fit, else unchanged."""
    if column.dtype.kind not in "iu" or not column.size:
        return column
    small = np.iinfo(np.int32)
    return column.astype(np.int32) if small.min <= column.min() and column.max() <= small.max else column


def source_names(ids: Array) -> Array:
    """Return integer ids unchanged, and all others as an array of strings."""
    return ids if np.issubdtype(ids.dtype, np.integer) else ids.astype(str)
