"""DuckDB as the engine of a preparation: rows of all sources in one table, on disk, and sorted streams of it."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from recsys_topk.datamodules.prepare.engine.chunks import value_at, whole_groups
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.tabular.tables.columns import one_chunk
from recsys_topk.tabular.tables.reader import TableReader

if TYPE_CHECKING:
    from typing import Self

NAME: Final = "work-3"
"""Name of the work folder. Change it if its content changes, so that files of older releases are not used."""

_MEMORY: Final = 100 << 20
"""Memory of the database per thread."""

_BATCH: Final = 1 << 18

Made = TypeVar("Made")
Clean = Callable[[Any, int, int], tuple[Any, Mapping[str, int]]]
"""Takes a record batch, the number of rows of its table before it, and of all tables before it; returns the rows to
keep, with the same columns for all tables, and the number of rows left out by reason."""


@dataclass(frozen=True)
class EngineTable:
    """A table to read: the reader, the columns to read, and the function that cleans its batches."""

    reader: TableReader
    columns: Sequence[str]
    clean: Clean


class DuckEngine:
    """Rows of tables in a DuckDB database on disk, which sorts them in bounded memory.

    The rows are committed when all tables are read. If the process is killed later, the next one does not read them
    again.

    Args:
        folder: The folder to prepare: empty, or with the files of an interrupted process. Files outside of the work
            folder are removed.
        progress: Receives the progress.
        memory: Memory of the database, e.g. ``"4GB"``; None = 100 MB per thread, at most a quarter of the machine's.
            Larger data are sorted on disk.
        threads: Number of threads; None = the processors of this process.

    Attributes:
        work: The work folder. Its other files may be used freely; they do not survive an interruption.
        left_out: Number of rows left out, by reason.
        seen: Number of rows read.
    """

    def __init__(self, folder: Path, progress: Progress, memory: str | None = None, threads: int | None = None) -> None:
        import duckdb

        self.work, self.progress = folder / NAME, progress
        self.left_out: Counter[str] = Counter()
        self.seen = 0
        self.schema: Any = None
        self._failure: BaseException | None = None
        self._source = "rows"
        self.work.mkdir(exist_ok=True)
        database = self.work / "rows.duckdb"
        for left in (*folder.iterdir(), *self.work.iterdir()):
            if left != self.work and not left.name.startswith(database.name):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        threads = threads or os.cpu_count() or 1
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * _MEMORY
        options: dict[str, Any] = {
            "memory_limit": memory or f"{min(machine // 4, max(threads, 2) * _MEMORY) >> 20}MiB",
            "threads": threads,
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "temp_directory": str(self.work / "rows.duckdb.spill"),
        }
        try:
            self._db = duckdb.connect(str(database), config=options)
        except duckdb.Error as error:
            raise ValueError(f"memory={memory!r} cannot be used: {_line(error)}; write e.g. 4GB") from error
        self._error, self._query = duckdb.Error, self._db.execute
        self._query("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        self._query("SET force_compression = 'uncompressed'")  # compressed text takes twice the CPU time
        self._query("CREATE TABLE IF NOT EXISTS facts (facts VARCHAR, schema BLOB)")

    def read(self, tables: Sequence[EngineTable]) -> int:
        """Read all tables once, unless an earlier process has read them. Return the number of rows kept."""
        sizes = [table.reader.rows for table in tables]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        done = self._query("FROM facts").fetchall()
        if done:
            facts, schema = json.loads(done[0][0]), done[0][1]
            self.seen, self.schema = facts["seen"], pa.ipc.read_schema(pa.py_buffer(schema))
            self.left_out.update(facts["left_out"])
            self.progress("read", self.seen, total)
        else:
            batches = self._cleaned(tables, total)
            first = next(batches, None)
            if first is None:
                return 0
            self.schema = first.schema
            with self._errors():
                self._db.register("reader", pa.RecordBatchReader.from_batches(self.schema, self._kept(first, batches)))
                named = ", ".join(self._column(name) for name in self.schema.names)
                self._query("BEGIN")
                self._query(f"CREATE TABLE rows AS SELECT * FROM reader AS rows({named})")
                facts = {"seen": self.seen, "left_out": self.left_out}
                self._query(
                    "INSERT INTO facts VALUES (?, ?)", [json.dumps(facts), self.schema.serialize().to_pybytes()]
                )
                self._query("COMMIT")
        return int(self._query("SELECT count(*) FROM rows").fetchall()[0][0])

    def _cleaned(self, tables: Sequence[EngineTable], total: int | None) -> Iterator[Any]:
        """Yield the rows to keep, with the types of the first batch."""
        for table in tables:
            before = self.seen
            for batch in table.reader.batches(table.columns):
                rows, left_out = cleaned(table.clean, table.reader.name, batch, self.seen - before, before)
                self.left_out.update(left_out)
                self.seen += batch.num_rows
                self.progress("read", batch.num_rows, total)
                if rows.num_rows:
                    yield rows if self.schema is None else converted(rows, self.schema, table.reader.name)

    def _kept(self, first: Any, rest: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and keep the error that one of them raises: the database reports only its text."""
        try:
            yield first
            yield from rest
        except BaseException as error:
            self._failure = error
            raise

    def span(self, column: str) -> tuple[int, int]:
        """Return the smallest and the largest value of a column of integers."""
        with self._errors():
            low, high = self._query(
                f"SELECT min({self._column(column)}), max({self._column(column)}) FROM rows"
            ).fetchall()[0]
        return int(low), int(high)

    def distinct(self, column: str) -> Any:
        """Return the distinct values of a column as a pyarrow array, in no particular order."""
        with self._errors():
            table = self._db.sql(f"SELECT DISTINCT {self._column(column)} AS id FROM rows").to_arrow_table()
        return one_chunk(table.column("id"))

    def quantiles(self, column: str, shares: Sequence[float], first_of: str | None = None) -> list[int]:
        """Return the values before which some shares of a sorted column of integers lie. They are exact.

        Counts in buckets that get narrower by 2^14 in each pass, so that memory does not grow with the rows.

        Args:
            column: The column.
            shares: Shares of the values, from 0 to 1.
            first_of: Take only the smallest value of each group, a column, and only rows with ``split`` -1.
        """
        value = self._column(column)
        source = f"SELECT {value} AS value FROM rows"
        if first_of is not None:
            source = f"SELECT min({value}) AS value FROM rows WHERE {self._column('__split')} < 0 "
            source += f"GROUP BY {self._column(first_of)}"
        with self._errors():
            self._query(f"CREATE OR REPLACE TEMP {'VIEW' if first_of is None else 'TABLE'} sorted AS {source}")
            number, lowest, highest = self._query("SELECT count(*), min(value), max(value) FROM sorted").fetchall()[0]

            def count(low: int, width: int, high: int) -> list[tuple[int, int]]:
                query = f"SELECT (value - {low}) // {width}, count(*) FROM sorted WHERE value BETWEEN {low} AND {high}"
                return list(self._query(f"{query} GROUP BY 1").fetchall())

            return [value_at(min(int(share * number), number - 1), lowest, highest, count) for share in shares]

    def count_before(
        self, made: Sequence[str], item: str, time: str, request: Sequence[str], label: str, above: float
    ) -> None:
        """Add three columns to the rows: what earlier requests say about the item of a row.

        They are the number of rows of the item in earlier requests, the number of those that are positive, and the
        seconds since the first request that has the item.

        Args:
            made: The names of the new columns.
            item: The column of the item.
            time: The column of the time in microseconds; a request has its smallest time.
            request: The columns that identify a request.
            label: The column of the label.
            above: Rows with a label above this are positive.
        """
        self.schema = pa.schema([*self.schema, *(pa.field(name, pa.int64()) for name in made)])
        number, seen, age = map(self._column, made)
        same = ", ".join(map(self._column, request))
        self._source = "counted"
        with self._errors():
            self._query(
                f"CREATE OR REPLACE TEMP VIEW counted AS SELECT * EXCLUDE begun, count(*) OVER earlier AS {number}, "
                f"count(*) FILTER ({self._column(label)} > {above}) OVER earlier AS {seen}, "
                f"(begun - min(begun) OVER (PARTITION BY {self._column(item)})) // 1000000 AS {age} FROM (SELECT *, "
                f"min({self._column(time)}) OVER (PARTITION BY {same}) AS begun FROM rows) "
                f"WINDOW earlier AS (PARTITION BY {self._column(item)} ORDER BY begun RANGE BETWEEN UNBOUNDED "
                f"PRECEDING AND 1 PRECEDING)"
            )

    def chunks(
        self,
        ids: Mapping[str, Any],
        order: Sequence[str],
        group: Sequence[str],
        rows: int,
        make: Callable[[Any], Made],
    ) -> Iterator[Made]:
        """Sort the rows and yield what `make` returns for each chunk of whole groups (`whole_groups`).

        Args:
            ids: For columns of ids, a table of each ``id`` and the ``number`` to replace it by.
            order: The columns to sort by.
            group: The first columns of the order: rows that agree in them stay together.
            rows: Maximum number of rows of a chunk with more than one group.
            make: Takes a pyarrow table.
        """
        kinds = {field.name: None if field.name in ids else field.type for field in self.schema}
        chosen = {name: f"rows.{self._column(name)}" for name in self.schema.names}
        joins = ""
        with self._errors():
            for name, numbered in ids.items():
                table = f"ids_{self._column(name)}"
                self._db.register("numbered", numbered)
                self._query(f"CREATE OR REPLACE TEMP TABLE {table} AS FROM numbered")
                joins += f" JOIN {table} ON {chosen[name]} = {table}.id"
                chosen[name] = f"{table}.number"
            columns = ", ".join(f"{expression} AS {self._column(name)}" for name, expression in chosen.items())
            by = ", ".join(chosen[name] for name in order)
            found = self._db.sql(f"SELECT {columns} FROM {self._source} AS rows{joins} ORDER BY {by}")
            batches = (_typed(batch, kinds) for batch in found.to_arrow_reader(_BATCH))
            for table in whole_groups(batches, group, rows):
                yield make(table)

    def _column(self, name: str) -> str:
        """Return the name of a column in the database, where case and quotes do not matter."""
        return f"c{self.schema.names.index(name)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Close the database, and remove the work folder if there was no error."""
        self._db.close()
        if kind is None:
            shutil.rmtree(self.work)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the error that a table caused, an interruption as such, and the database's errors in one line."""
        try:
            yield
        except self._error as error:
            if self._failure is not None:
                raise self._failure from None
            advice = "; give it more memory: --data.memory 4GB" if "emory" in str(error) else ""
            raise ValueError(f"the rows cannot be sorted: {_line(error)}{advice}") from error
        except RuntimeError as error:
            if "interrupted" in str(error):
                raise KeyboardInterrupt from None
            raise


def converted(batch: Any, schema: Any, source: str) -> Any:
    """Return a batch with the types of a schema.

    Raises:
        ValueError: A column has another type, and cannot be converted.
    """
    if batch.schema == schema:
        return batch
    made = []
    for field in schema:
        column = batch.column(field.name)
        try:
            made.append(column.cast(field.type, safe=False))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ValueError(
                f"column {field.name.removeprefix('.')!r} is {column.type} in {source} and {field.type} before; make "
                f"it one type"
            ) from None
    return pa.record_batch(made, schema=schema)


def cleaned(clean: Clean, name: str, batch: Any, start: int, before: int) -> tuple[Any, Mapping[str, int]]:
    """Clean a batch of a table. An error names the first row that causes it."""
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
        raise ValueError(f"{name}, row {start + bad}: {reason}") from reason


def _typed(batch: Any, kinds: Mapping[str, Any]) -> Any:
    """Return a batch with the names and types of the source; None = the type of the database."""
    columns = {}
    for (name, kind), column in zip(kinds.items(), batch.columns, strict=True):
        if kind is not None and column.type != kind:
            column = pa.nulls(len(column)) if pa.types.is_null(kind) else column.cast(kind)
        columns[name] = column
    return pa.record_batch(columns)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
