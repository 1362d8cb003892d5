"""The distinct ids of a column: their keys, and the ids themselves if they are strings."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.tabular.ids.counter import IdCounter
from recsys_topk.tabular.tables.columns import Keys, keys_of
from recsys_topk.types import Array


class RawIds:
    """The distinct ids of a column: their keys, and the ids if they are strings.

    Attributes:
        text: Whether any id is text that is not a number.

    Example:
        >>> import pyarrow as pa
        >>> ids, column = RawIds(), pa.array(["a", "7", "a"])
        >>> ids.add(column, keys_of(column))
        >>> sorted(ids.ids(ids.keys()))
        ['7', 'a']
    """

    def __init__(self) -> None:
        self._counter = IdCounter(counting=False)
        self._texts: dict[int, str] = {}
        self.text = False

    def add(self, column: Any, keys: Keys, *, texts_only: bool = False) -> None:
        """Add the ids of a column, without missing ones. An integer is its key, so `texts_only` skips integers."""
        if not texts_only:
            self._counter.add(keys.keys[~keys.missing])
        if keys.text:
            self.text = True
            distinct = column.unique().drop_null().cast("string")
            self._texts.update(zip(keys_of(distinct).keys.tolist(), distinct.to_pylist(), strict=True))

    def keys(self) -> Array:
        """Return the keys, ascending."""
        return self._counter.keys()

    def add_keys(self, keys: Array) -> None:
        """Add integer ids."""
        self._counter.add(keys)

    def to_plain(self) -> list[Any]:
        """Return the string ids as plain values. The keys are not included."""
        return [list(self._texts.items()), self.text]

    def merge_plain(self, plain: list[Any]) -> None:
        """Add the result of `to_plain` of another collection."""
        self._texts.update((int(key), text) for key, text in plain[0])
        self.text |= bool(plain[1])

    def id(self, key: int) -> Any:
        """Return the id of a key: an integer if all ids are integers, else a string."""
        return self._texts.get(key, str(key)) if self.text else key

    def ids(self, keys: Array) -> Any:
        """Return the ids of keys: integers if all ids are integers, else strings."""
        return np.array([self.id(key) for key in keys.tolist()], dtype=object) if self.text else keys
