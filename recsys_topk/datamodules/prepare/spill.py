"""Read tables once, piece by piece, and distribute their rows to parts on disk. A later process can resume."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.files import remove_partial, whole_folder
from recsys_topk.tabular.arrow import read_streams
from recsys_topk.tabular.ids.keys import mixed
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.types import Array

MOST_PARTS: Final = 128
_FACTS: Final = "facts.json"
_SCHEMA: Final = "schema"


class Piece(ABC):
    """Reads one piece of a table into a folder: one Arrow file per part, and statistics.

    Args:
        folder: The folder of the piece.
        pieces: The collection that the piece belongs to.
        source: The name of the table, for error messages.
    """

    def __init__(self, folder: Path, pieces: Pieces, source: str) -> None:
        self.folder, self.source = folder, source
        self._parts, self._seed, self._schema = pieces.parts, pieces.seed, pieces.schema
        self._writers: dict[int, Any] = {}

    @abstractmethod
    def add(self, batch: Any) -> None:
        """Read a record batch of the table; pass the rows to `write`."""

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Return statistics of the piece as plain values."""

    def write(self, batch: Any, keys: Array) -> None:
        """Write rows to the parts of their keys. Columns are converted to the types of the first batch of all pieces.

        Raises:
            ValueError: A column has another type than in the first batch, and cannot be converted.
        """
        self._schema = self._schema or batch.schema
        part = (mixed(keys, self._seed) % np.uint64(self._parts)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        batch = self._converted(batch).take(pa.array(order))
        edges = np.searchsorted(part[order], np.arange(self._parts + 1))
        for number in np.flatnonzero(np.diff(edges)).tolist():
            if number not in self._writers:
                self._writers[number] = pa.ipc.new_stream(str(self.folder / f"{number}.rows"), batch.schema)
            self._writers[number].write_batch(batch.slice(edges[number], edges[number + 1] - edges[number]))

    def _converted(self, batch: Any) -> Any:
        if batch.schema == self._schema:
            return batch
        made = []
        for field in self._schema:
            column = batch.column(field.name)
            try:
                made.append(column.cast(field.type, safe=False))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise ValueError(
                    f"column {field.name!r} is {column.type} in {self.source} and {field.type} before; make it one type"
                ) from None
        return pa.record_batch(made, schema=self._schema)

    def close(self, seen: int) -> None:
        """Finish the files. `seen` is the number of rows read."""
        for writer in self._writers.values():
            writer.close()
        if self._schema is not None:
            (self.folder / _SCHEMA).write_bytes(self._schema.serialize().to_pybytes())
        text = json.dumps({"seen": seen, **self.statistics()})
        (self.folder / _FACTS).write_text(text, encoding="utf-8")


class Pieces:
    """Rows of tables, distributed to parts by a hash of a key, so that memory holds one part at a time.

    A piece of a table is a file or some of its row groups. Its folder appears when the piece is complete. A killed
    process loses only the piece that it was reading; the next process resumes with that piece.

    Args:
        folder: The folder of the pieces, which may hold pieces of an earlier process.
        parts: Number of parts.
        seed: Seed of the hash that assigns keys to parts.

    Attributes:
        schema: The columns of the rows; None = no rows were written.
    """

    def __init__(self, folder: Path, parts: int, seed: int) -> None:
        self.folder, self.parts, self.seed = folder, parts, seed
        self.schema: Any = None
        self._folders: list[Path] = []

    def read(
        self,
        reader: TableReader,
        columns: Sequence[str],
        start: Callable[[Path], Piece],
        done: Callable[[int], None],
    ) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """Read a table, except for the pieces that were read before; yield the folder and statistics of each piece.

        Args:
            reader: The table.
            columns: The columns to read.
            start: Returns a new piece in the given folder.
            done: Called with the number of rows of each batch that was read.
        """
        for number in range(reader.pieces):
            target = self.folder / f"piece-{len(self._folders)}"
            read_before = target.is_dir()
            if not read_before:
                remove_partial(target)
                with whole_folder(target) as folder:
                    piece, seen = start(folder), 0
                    for batch in reader.batches(columns, number):
                        piece.add(batch)
                        seen += batch.num_rows
                        done(batch.num_rows)
                    piece.close(seen)
            self._folders.append(target)
            facts = json.loads((target / _FACTS).read_text(encoding="utf-8"))
            if read_before:
                done(facts["seen"])
            if (target / _SCHEMA).is_file():
                self.schema = pa.ipc.read_schema(pa.py_buffer((target / _SCHEMA).read_bytes()))
            yield target, facts

    def part(self, number: int, columns: Sequence[str] | None = None) -> Any:
        """Return the rows of a part as a table. Rows with the same key keep the order of the source."""
        batches = list(read_streams(piece / f"{number}.rows" for piece in self._folders))
        table = pa.Table.from_batches(batches, self.schema)
        return (table if columns is None else table.select(list(columns))).combine_chunks()

    def drop(self, number: int) -> None:
        """Remove the files of a part."""
        for piece in self._folders:
            (piece / f"{number}.rows").unlink(missing_ok=True)


def total_rows(readers: Iterable[TableReader]) -> int | None:
    """Return the number of rows of some tables, or None if it is not known without reading them."""
    rows = [reader.rows for reader in readers]
    return None if None in rows else sum(number or 0 for number in rows)
