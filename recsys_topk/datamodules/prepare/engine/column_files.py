"""Columns on disk: rows are appended in parts, and columns are read as memory-mapped arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recsys_topk.types import Array


class ColumnFiles:
    """Named columns, each in a file of raw numbers. Memory: that of the rows appended in one call.

    Args:
        folder: The folder of the files; it must exist. Files of an earlier object are replaced.

    Example:
        >>> import tempfile
        >>> columns = ColumnFiles(Path(tempfile.mkdtemp()))
        >>> columns.append("train.item", np.array([1, 2]))
        >>> columns.append("train.item", np.array([3]))
        >>> columns.table("train")["item"].tolist(), columns.length("train.item")
        ([1, 2, 3], 3)
        >>> columns.close()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._layouts: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._lengths: dict[str, int] = {}

    def append(self, name: str, values: Array) -> None:
        """Append rows, (n,) or (n, width). Dtype and width must be the same in all calls."""
        layout = (values.dtype, values.shape[1:])
        if name not in self._files:
            self._files[name] = (self.folder / f"{name}.column").open("wb")
            self._layouts[name], self._lengths[name] = layout, 0
        if layout != self._layouts[name]:
            raise ValueError(f"column {name!r} has {self._layouts[name]}, got {layout}")
        values.tofile(self._files[name])
        self._lengths[name] += len(values)

    def length(self, name: str) -> int:
        """Return the number of rows of a column; 0 if nothing was appended."""
        return self._lengths.get(name, 0)

    def column(self, name: str) -> Array:
        """Return a column as a memory-mapped array; an empty one if nothing was appended."""
        if name not in self._files:
            return np.empty(0, dtype=np.int64)
        self._files[name].flush()
        dtype, shape = self._layouts[name]
        shape = (self._lengths[name], *shape)
        if 0 in shape:
            return np.empty(shape, dtype=dtype)
        return np.memmap(self.folder / f"{name}.column", dtype=dtype, mode="r", shape=shape)

    def table(self, name: str) -> dict[str, Array]:
        """Return the columns whose names begin with the name of the table and a dot."""
        found = [column for column in self._files if column.startswith(f"{name}.")]
        return {column.removeprefix(f"{name}."): self.column(column) for column in found}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
