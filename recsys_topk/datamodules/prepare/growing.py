"""Columns on disk: rows are appended in parts, and columns are read as memory-mapped arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recsys_topk.types import Array


class GrowingColumns:
    """Named columns, each stored in a file of raw numbers. Memory: that of the rows appended in one call.

    Args:
        folder: The folder of the files; it must exist.
        state: The result of `state` of an earlier object, to resume from. Rows appended after it are dropped.

    Example:
        >>> import tempfile
        >>> columns = GrowingColumns(Path(tempfile.mkdtemp()))
        >>> columns.append("item", np.array([1, 2]))
        >>> columns.append("item", np.array([3]))
        >>> columns.column("item").tolist(), columns.length("item")
        ([1, 2, 3], 3)
        >>> state = columns.state()
        >>> columns.append("item", np.array([4]))
        >>> columns.close()
        >>> again = GrowingColumns(columns.folder, state)
        >>> again.column("item").tolist()
        [1, 2, 3]
        >>> again.close()
    """

    def __init__(self, folder: Path, state: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._layouts: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._lengths: dict[str, int] = {}
        for name, (dtype, shape, length) in (state or {}).items():
            self._files[name] = (folder / f"{name}.column").open("r+b")
            self._layouts[name], self._lengths[name] = (np.dtype(dtype), tuple(shape)), length
            size = length * np.dtype(dtype).itemsize * math.prod(shape)
            self._files[name].truncate(size)
            self._files[name].seek(size)

    def state(self) -> dict[str, Any]:
        """Flush the files and return their types, shapes and lengths as plain values."""
        for file in self._files.values():
            file.flush()
        return {name: [dtype.str, list(shape), self._lengths[name]] for name, (dtype, shape) in self._layouts.items()}

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._files)

    def append(self, name: str, values: Array) -> None:
        """Append rows, (n,) or (n, width). Dtype and width must be the same in all calls."""
        layout = (values.dtype, values.shape[1:])
        if name not in self._files:
            self._files[name] = (self.folder / f"{name}.column").open("wb")
            self._layouts[name], self._lengths[name] = layout, 0
        if layout != self._layouts[name]:
            raise ValueError(f"column {name!r} has {self._layouts[name]}, got {layout}")
        values.tofile(self._files[name])
        self._lengths[name] += values.shape[0]

    def length(self, name: str) -> int:
        """Return the number of rows of a column; 0 if the column does not exist."""
        return self._lengths.get(name, 0)

    def column(self, name: str) -> Array:
        """Return a column as a memory-mapped array."""
        self._files[name].flush()
        dtype, shape = self._layouts[name]
        if not self._lengths[name] or 0 in shape:
            return np.empty((self._lengths[name], *shape), dtype=dtype)
        path = self.folder / f"{name}.column"
        return np.memmap(path, dtype=dtype, mode="r", shape=(self._lengths[name], *shape))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
