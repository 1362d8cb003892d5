"""Distribute rows to parts by request (an external sort): all rows of a list are in one part, in any row order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.id_keys import mixed

Array = npt.NDArray[Any]

IN_MEMORY: Final = 128 << 20
"""Bytes of rows kept in memory before they are written to files."""

PARTS: Final = 128


class RowParts:
    """Record batches with an int64 request column, distributed to parts by a hash of it.

    Up to `limit` bytes are one part in memory. More rows are written to `PARTS` files, and memory holds one part.

    Args:
        folder: Folder of the files, if files are needed.
        request: The name of the request column.
        limit: Maximum number of bytes kept in memory.
    """

    def __init__(self, folder: Path, request: str, limit: int = IN_MEMORY) -> None:
        self.folder, self.request, self.limit = folder, request, limit
        self.rows = 0
        self._held: list[Any] = []
        self._bytes = 0
        self._writers: dict[int, Any] = {}

    def add(self, batch: Any) -> None:
        """Add a record batch; all batches must have the same columns and types."""
        self.rows += batch.num_rows
        if self._writers:
            self._deal(batch)
            return
        self._held.append(batch)
        self._bytes += batch.nbytes
        if self._bytes > self.limit:
            held, self._held = self._held, []
            for each in held:
                self._deal(each)

    def close(self) -> None:
        """Finish writing."""
        for writer in self._writers.values():
            writer.close()

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield the parts as tables with some columns; rows of a part keep their original order."""
        import pyarrow as pa

        if self._held:
            table = pa.Table.from_batches(self._held)
            yield table if columns is None else table.select(list(columns))
        for part in sorted(self._writers):
            with pa.memory_map(str(self.folder / f"{part}.rows")) as source:
                table = pa.ipc.open_stream(source).read_all()
                yield (table if columns is None else table.select(list(columns))).combine_chunks()

    def _deal(self, batch: Any) -> None:
        import pyarrow as pa

        part = (mixed(np.asarray(batch.column(self.request)), 11) % np.uint64(PARTS)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        batch = batch.take(pa.array(order))
        edges = np.searchsorted(part[order], np.arange(PARTS + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            if number not in self._writers:
                self._writers[number] = pa.ipc.new_stream(str(self.folder / f"{number}.rows"), batch.schema)
            self._writers[number].write_batch(batch.slice(edges[number], edges[number + 1] - edges[number]))
