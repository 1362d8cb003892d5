"""What all engines of a preparation share: the SQL, the cleaning of rows, and chunks that a later process finds."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.prepare.engine.chunks import ChunkWriter, read_chunk
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.files import write_whole
from recsys_topk.tabular.tables.columns import one_chunk
from recsys_topk.tabular.tables.reader import TableReader
from recsys_topk.types import Array

if TYPE_CHECKING:
    from typing import Self

VERSION: Final = 4
"""Version of the work folder. Change it if its content changes, so that files of older releases are not used."""

_BUCKETS: Final = 1 << 14

Clean = Callable[[Any, int, int], tuple[Any, Mapping[str, int]]]
"""Takes a record batch, the number of rows of its table before it, and of all tables before it; returns the rows to
keep, with the same columns for all tables, and the number of rows left out by reason."""


@dataclass(frozen=True)
class EngineTable:
    """A table to read: the reader, the columns to read, and the function that cleans its batches."""

    reader: TableReader
    columns: Sequence[str]
    clean: Clean


class Engine(ABC):
    """Rows of tables, cleaned and sorted in bounded memory.

    If the process is killed, the next one reads only what was not read, and sorts only the rows after the last chunk.

    Args:
        folder: The folder to prepare: empty, or with the files of an interrupted process. Files outside of the work
            folder are removed.
        progress: Receives the progress.

    Attributes:
        work: The work folder. It is removed when the preparation is complete.
        left_out: Number of rows left out, by reason.
        seen: Number of rows read.
        kept: Number of rows kept.
        schema: The columns of the rows.
    """

    name: ClassVar[str]
    whole_division: ClassVar[str]
    """The operator of integer division."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.work, self.progress = folder / f"work-{VERSION}-{self.name}", progress
        for left in folder.iterdir():
            if left != self.work:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        self.work.mkdir(exist_ok=True)
        self.left_out: Counter[str] = Counter()
        self.seen = self.kept = 0
        self.schema: Any = None
        self._source = "logged"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the engine, and remove the work folder if there was no error."""
        self._close(kind is None or issubclass(kind, Exception))
        if kind is None:
            shutil.rmtree(self.work)

    @abstractmethod
    def _close(self, ended: bool) -> None:
        """Close connections, and remove files outside of the work folder unless the preparation is interrupted."""

    @abstractmethod
    def _ask(self, query: str) -> Any:
        """Run a query and return its result as a pyarrow table."""

    @abstractmethod
    def _fill(self, tables: Sequence[EngineTable], total: int | None) -> None:
        """Read the tables, or what is left of them, into the table ``logged``; set `seen` and `left_out`."""

    @abstractmethod
    def _add(self, name: str, table: Any) -> None:
        """Add a pyarrow table, or a reader of record batches, to the database."""

    @abstractmethod
    def _chunks(self, query: str, order: Sequence[str], write: ChunkWriter) -> Iterator[Any]:
        """Yield what `write` returns for the rows of a query, sorted; values of the first column stay together."""

    def read(self, tables: Sequence[EngineTable]) -> int:
        """Read all tables once, unless an earlier process has read them. Return the number of rows kept."""
        first = (
            cleaned(table.clean, piece, batch, 0, 0)
            for table in tables
            for piece in table.reader.pieces()
            for batch in piece.batches(table.columns)
        )
        self.schema = next((rows.schema for rows, _ in first), None)
        if self.schema is None:  # all lists are empty
            return 0
        sizes = [table.reader.rows for table in tables]
        self._fill(tables, None if None in sizes else sum(size or 0 for size in sizes))
        self.kept = int(self._ask("SELECT count(*) AS number FROM logged").column(0)[0].as_py())
        return self.kept

    def _column(self, name: str) -> str:
        """Return the name of a column in the database, where case, dots and quotes do not matter."""
        return f"c{self.schema.names.index(name)}"

    def span(self, column: str) -> tuple[int, int]:
        """Return the smallest and the largest value of a column of integers."""
        name = self._column(column)
        low, high = self._ask(f"SELECT min({name}) AS low, max({name}) AS high FROM logged").to_pylist()[0].values()
        return int(low), int(high)

    def distinct(self, column: str) -> Any:
        """Return the distinct values of a column as a pyarrow array, in no particular order."""
        return one_chunk(self._ask(f"SELECT DISTINCT {self._column(column)} AS id FROM logged").column(0))

    def quantiles(self, column: str, shares: Sequence[float]) -> list[int]:
        """Return the values before which some shares of a sorted column of integers lie. They are exact.

        Counts in buckets that get narrower by 2^14 in each pass, so that memory does not grow with the rows.
        """
        name, found = self._column(column), []
        for share in shares:
            place, (low, high) = min(int(share * self.kept), self.kept - 1), self.span(column)
            while low < high:
                width = (high - low) // _BUCKETS + 1
                counted = self._ask(
                    f"SELECT ({name} - {low}) {self.whole_division} {width} AS bucket, count(*) AS number FROM logged "
                    f"WHERE {name} BETWEEN {low} AND {high} GROUP BY 1 ORDER BY 1"
                )
                bucket, number = (np.asarray(one_chunk(counts)) for counts in counted.columns)
                at = int(np.searchsorted(np.cumsum(number), place, side="right"))
                place -= int(number[:at].sum())
                low += int(bucket[at]) * width
                high = min(low + width - 1, high)
            found.append(low)
        return found

    def begins(self) -> Array:
        """Return the times of the requests of lists that have no split, ascending."""
        time, split, request = map(self._column, ("__time", "__split", "__request"))
        found = self._ask(f"SELECT min({time}) AS begun FROM logged WHERE {split} < 0 GROUP BY {request}")
        return np.sort(np.asarray(one_chunk(found.column(0))))

    def raise_labels(self, told: Iterator[Any], keys: Sequence[str], label: str, group: str) -> tuple[int, int]:
        """Give each row the label and the group that is told for its keys, if the label is larger.

        Args:
            told: Record batches with the keys as text, the label and the group; the largest label of a key counts.
            keys: The columns that identify a row.
            label: The column of labels.
            group: The column of groups.

        Returns:
            The number of different keys that were told, and how many of them have a row.
        """
        kinds = [(key, pa.string()) for key in keys] + [(name, self.schema.field(name).type) for name in (label, group)]
        schema = pa.schema([(self._column(name), kind) for name, kind in kinds])
        batches = (batch.rename_columns(schema.names) for batch in told)
        self._add("events", pa.RecordBatchReader.from_batches(schema, batches))
        by, (old, own) = ", ".join(map(self._column, keys)), map(self._column, (label, group))
        self._ask(
            f"CREATE OR REPLACE TEMP VIEW told AS SELECT {by}, max({old}) AS best, max_by({own}, {old}) AS best_group "
            f"FROM events GROUP BY {by}"
        )
        same = " AND ".join(f"CAST({self._source}.{key} AS STRING) = told.{key}" for key in map(self._column, keys))
        taken = {column: f"{self._source}.{column}" for column in map(self._column, self.schema.names)}
        for column, value in ((old, "best"), (own, "best_group")):
            taken[column] = f"CASE WHEN best > {self._source}.{old} THEN {value} ELSE {taken[column]} END"
        named = ", ".join(f"{value} AS {column}" for column, value in taken.items())
        self._ask(f"CREATE OR REPLACE TEMP VIEW raised AS SELECT {named} FROM {self._source} LEFT JOIN told ON {same}")
        there = f"SELECT count(*) FROM told WHERE EXISTS (SELECT 1 FROM {self._source} WHERE {same})"
        counts = [self._ask(query).column(0)[0].as_py() for query in ("SELECT count(*) FROM told", there)]
        self._source = "raised"
        return int(counts[0]), int(counts[1])

    def count_before(self, made: Sequence[str], above: float) -> None:
        """Add columns to the rows of lists: what the requests before that of a row say about its item.

        They are the number of rows of the item in earlier requests, the number of those whose label is above `above`,
        and the seconds since the first request that has the item. A request has its smallest time.
        """
        named, source = ", ".join(map(self._column, self.schema.names)), self._source
        self.schema = pa.schema([*self.schema, *(pa.field(name, pa.int64()) for name in made)])
        number, seen, age = map(self._column, made)
        item, time, label, *request = map(self._column, ("__item", "__time", "__label", "__request", "__split"))
        self._ask(
            f"CREATE OR REPLACE TEMP VIEW counted AS SELECT {named}, count(*) OVER earlier AS {number}, "
            f"count(CASE WHEN {label} > {above} THEN 1 END) OVER earlier AS {seen}, "
            f"(begun - min(begun) OVER (PARTITION BY {item})) {self.whole_division} 1000000 AS {age} FROM "
            f"(SELECT *, min({time}) OVER (PARTITION BY {', '.join(request)}) AS begun FROM {source}) AS timed WINDOW "
            f"earlier AS (PARTITION BY {item} ORDER BY begun RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
        )
        self._source = "counted"

    def chunks(
        self,
        ids: Mapping[str, Any],
        order: Sequence[str],
        rows: int,
        make: Callable[[Any], Mapping[str, Any]],
    ) -> Iterator[dict[str, Any]]:
        """Sort the rows and yield what `make` returns for each chunk of whole groups (`whole_groups`).

        Chunks that an earlier process has made are yielded first, and only the rows after them are sorted.

        Args:
            ids: For columns of ids, a table of each ``id`` and the ``number`` to replace it by.
            order: The columns to sort by. Rows that agree in the first one are a group.
            rows: Maximum number of rows of a chunk with more than one group.
            make: Takes a pyarrow table; returns named arrays, which may differ in length.
        """
        after, number = None, 0
        for columns, last in self.saved():
            after, number = last, number + 1
            yield columns
        complete = self.work / "complete"
        if complete.is_file():
            return
        chosen, joins = {name: f"{self._source}.{self._column(name)}" for name in self.schema.names}, ""
        for name, numbered in ids.items():
            table = f"ids_{self._column(name)}"
            self._add(table, numbered)
            joins += f" JOIN {table} ON {chosen[name]} = {table}.id"
            chosen[name] = f"{table}.number"
        named = ", ".join(f"{expression} AS {self._column(name)}" for name, expression in chosen.items())
        query = f"SELECT {named} FROM {self._source}{joins}"
        query += "" if after is None else f" WHERE {chosen[order[0]]} > {after}"
        kinds = {field.name: None if field.name in ids else field.type for field in self.schema}
        write = ChunkWriter(make, kinds, order[0], rows)
        for content in self._chunks(query, [*map(self._column, order)], write):
            path = self.work / f"{number:09}.chunk"
            write_whole(path, content)
            number += 1
            yield read_chunk(path)[0]
        complete.touch()

    def saved(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the chunks that are made, and the last group of each."""
        yield from map(read_chunk, sorted(self.work.glob("*.chunk")))


def cleaned(clean: Clean, piece: TableReader, batch: Any, start: int, before: int) -> tuple[Any, Mapping[str, int]]:
    """Clean a batch of a piece of a table. An error names the file, and the first row that causes it."""
    try:
        return clean(batch, start, before)
    except ValueError as error:
        good, bad, reason = 0, batch.num_rows, error
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                clean(batch.slice(0, middle), start, before)
                good = middle
            except ValueError as first:
                bad, reason = middle, first
        raise ValueError(f"{piece.name}, row {start + bad - piece.opens}: {reason}") from reason
