"""What a data module hands to an export: items and users as memory-mapped Arrow files. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ITEMS: Final = "items.arrow"
USERS: Final = "users.arrow"


class Names:
    """The names of items or users, as the data call them, and the row of each.

    Args:
        names: (n,) integers or texts, all different.

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
        """Whether names are integers."""
        return bool(np.issubdtype(self.names.dtype, np.integer))

    @cached_property
    def _order(self) -> tuple[Array, Array] | None:
        """The names in ascending order and their rows, or None if they are ascending as they stand."""
        if len(self.names) < 2 or bool((self.names[1:] > self.names[:-1]).all()):
            return None
        order = np.argsort(self.names, kind="stable")
        return self.names[order], order

    def rows(self, wanted: Any) -> npt.NDArray[np.int64]:
        """Return the row of each name, -1 for those that are unknown. Integers may be given as text and vice versa."""
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
            numbers = (_integer(one) for one in np.asarray(wanted, dtype=object).ravel())
            return [one if one is not None and limits.min <= one <= limits.max else None for one in numbers]
        return given.astype(str) if given.dtype.kind != "U" else given


def _integer(value: Any) -> int | None:
    """Return the integer that a name is: as a number, or as text written as a number is ("007" is not)."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if value == (str(number) if isinstance(value, str) else number) else None


@dataclass(frozen=True)
class ItemTable:
    """The catalogue.

    Attributes:
        names: (C,) the items as the data call them.
        ids: (C, F_i) integers, as `CascadeBatch.items` holds them.
        values: (C, V_i) float32, as `CascadeBatch.item_values` holds them.
        count: (C,) how often each item occurs in the data.
    """

    names: Array
    ids: Array
    values: Array
    count: Array

    def write(self, path: Path) -> None:
        """Write an Arrow file that `read` maps."""
        _write(path, {"name": self.names, "ids": self.ids, "values": self.values, "count": self.count})

    @classmethod
    def read(cls, path: Path) -> ItemTable:
        """Map what `write` wrote: arrays share the memory of the file, but for names that are texts."""
        columns = _read(path)
        return cls(columns["name"], columns["ids"], columns["values"], columns["count"])

    @cached_property
    def index(self) -> Names:
        """The rows of the items by name."""
        return Names(self.names)


@dataclass(frozen=True)
class UserTable:
    """The newest state of each user, encoded.

    Attributes:
        names: (U,) the users as the data call them.
        request: (U, F_r) integers, as `CascadeBatch.request` holds them.
        request_values: (U, V_r) float32.
        history: (U, L, F_h) integers, padding last.
        history_length: (U,) integers.
        history_values: (U, L, V_h) float32.
        seen: (S,) rows of the items that the users have had, user by user.
        seen_ends: (U,) one past the last of each user.
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
        length = {"views": self.history.shape[1]}
        columns = {
            "name": self.names,
            "request": self.request,
            "request_values": self.request_values,
            "history": self.history.reshape(len(self.names), -1),
            "history_length": self.history_length,
            "history_values": self.history_values.reshape(len(self.names), -1),
        }
        _write(path, columns, length, {"seen": (self.seen, self.seen_ends)})

    @classmethod
    def read(cls, path: Path) -> UserTable:
        """Map what `write` wrote."""
        columns = _read(path)
        views = int(columns.pop("views"))
        number = len(columns["name"])
        for field in ("history", "history_values"):
            columns[field] = columns[field].reshape(number, views, -1) if views else columns[field][:, None][:, :0]
        return cls(names=columns.pop("name"), **columns)

    @cached_property
    def index(self) -> Names:
        """The rows of the users by name."""
        return Names(self.names)

    def seen_of(self, row: int) -> Array:
        """Return the rows of the items that a user has had."""
        start = self.seen_ends[row - 1] if row else 0
        return self.seen[start : self.seen_ends[row]]

    def sorted(self) -> UserTable:
        """Return the users in the order of their names."""
        order = np.argsort(self.names, kind="stable")
        kept = {
            field.name: getattr(self, field.name)[order] for field in fields(self) if not field.name.startswith("seen")
        }
        lists = [self.seen_of(row) for row in order.tolist()]
        ends = np.cumsum([len(own) for own in lists], dtype=np.int64)
        return UserTable(**kept, seen=np.concatenate([self.seen[:0], *lists]), seen_ends=ends)


def newest_rows(names: Sequence[Array]) -> list[Array]:
    """Return, for each of several arrays of names, oldest first, the rows of the names whose newest row it holds.

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


def _write(
    path: Path,
    columns: Mapping[str, Array],
    facts: Mapping[str, int] | None = None,
    lists: Mapping[str, tuple[Array, Array]] | None = None,
) -> None:
    """Write columns (n,) and (n, width), numbers, and columns of lists, given flat and one past each end."""
    import pyarrow as pa

    arrays, widths = {}, dict(facts or {})
    for name, column in columns.items():
        if column.ndim == 1:
            arrays[name] = pa.array(column)
            continue
        widths[f"width {name}"] = column.shape[1]
        if column.shape[1]:  # a column of width 0 is its width alone
            flat = pa.array(np.ascontiguousarray(_narrow(column)).reshape(-1))
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, column.shape[1])
    for name, (flat, ends) in (lists or {}).items():
        arrays[name] = pa.LargeListArray.from_arrays(pa.array(np.append(0, ends)), pa.array(_narrow(flat)))
    table = pa.table(arrays).replace_schema_metadata({name: str(value) for name, value in widths.items()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(table.num_rows, 1))


def _read(path: Path) -> dict[str, Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    facts = {name.decode(): int(value) for name, value in (table.schema.metadata or {}).items()}
    found: dict[str, Any] = {name: value for name, value in facts.items() if not name.startswith("width ")}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            found[name] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
        elif pa.types.is_large_list(column.type):
            found[name], found[f"{name}_ends"] = column.values.to_numpy(), column.offsets.to_numpy()[1:]
        elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found[name] = np.asarray(column.to_numpy(zero_copy_only=False), dtype=str)
        else:
            found[name] = column.to_numpy()
    for name, width in facts.items():
        if name.startswith("width ") and not width:
            found[name.removeprefix("width ")] = np.empty((table.num_rows, 0), dtype=np.float32)
    return found


def _narrow(column: Array) -> Array:
    """Return integers in 32 bits if they fit."""
    if column.dtype.kind not in "iu" or not column.size:
        return column
    small = np.iinfo(np.int32)
    return column.astype(np.int32) if small.min <= column.min() and column.max() <= small.max else column


def source_names(ids: Array) -> Array:
    """Return ids as the source has them: integers as they are, others as an array of texts."""
    return ids if np.issubdtype(ids.dtype, np.integer) else ids.astype(str)
