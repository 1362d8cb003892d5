"""DuckDB as the engine of a preparation: rows of all sources in one table, on disk, and sorted streams of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa

from recsys_topk.datamodules.prepare.engine.base import Engine, EngineTable, cleaned
from recsys_topk.datamodules.prepare.engine.chunks import ChunkWriter, converted
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.machine import machine_memory
from recsys_topk.tabular.tables.reader import TableReader

_MEMORY: Final = 100 << 20
"""Memory of the database per thread."""

_BATCH: Final = 1 << 18
_POLL: Final = 0.2
"""Seconds between two reports of the progress of a query."""


class DuckEngine(Engine):
    """Rows of tables in a DuckDB database on disk, which sorts them in bounded memory.

    Args:
        folder: See `Engine`.
        progress: See `Engine`.
        memory: Memory of the database, e.g. ``"4GB"``; None = 100 MB per thread, at most a quarter of the machine's.
            Larger data are sorted on disk.
    """

    name: ClassVar[str] = "duckdb"
    whole_division: ClassVar[str] = "//"

    def __init__(self, folder: Path, progress: Progress, memory: str | None = None) -> None:
        import duckdb

        super().__init__(folder, progress)
        self._failure: BaseException | None = None
        database = self.work / "rows.duckdb"
        threads = os.cpu_count() or 1
        machine = machine_memory() or 16 * _MEMORY
        options: dict[str, Any] = {
            "memory_limit": memory or f"{min(machine // 4, max(threads, 2) * _MEMORY) >> 20}MiB",
            "threads": threads,
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "temp_directory": f"{database}.spill",
        }
        try:
            self._db = duckdb.connect(str(database), config=options)
        except duckdb.Error as error:
            raise ValueError(f"memory={memory!r} cannot be used: {_line(error)}; write e.g. 4GB") from error
        self._error = duckdb.Error
        self._ask("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        self._ask("SET force_compression = 'uncompressed'")  # compressed text takes twice the CPU time

    def _close(self, ended: bool) -> None:
        self._db.close()

    def _ask(self, query: str) -> Any:
        with self._errors():
            found = self._db.sql(query)
            return None if found is None else found.to_arrow_table()

    def _add(self, name: str, table: Any) -> None:
        self._db.register("added", table)
        self._ask(f"CREATE OR REPLACE TEMP TABLE {name} AS FROM added")

    def _fill(self, tables: Sequence[EngineTable], total: int | None) -> None:
        """See `Engine`. The pieces of the tables are committed one by one."""
        named = ", ".join(map(self._column, self.schema.names))
        self._db.register("none", self.schema.empty_table())
        self._ask(f"CREATE TABLE IF NOT EXISTS logged AS SELECT * FROM none AS none({named})")
        self._ask("CREATE TABLE IF NOT EXISTS facts (facts VARCHAR)")
        pieces = [(table, place, piece) for table in tables for place, piece in enumerate(table.reader.pieces())]
        done = before = 0
        for (facts,) in self._db.execute("FROM facts").fetchall():
            done, self.seen, before, left_out = json.loads(facts)
            self.left_out.update(left_out)
            self.progress("read", self.seen, total)
        for number, (table, place, piece) in enumerate(pieces[done:], done + 1):
            before = before if place else self.seen
            batches = self._cleaned(table, piece, before, total)
            self._db.register("reader", pa.RecordBatchReader.from_batches(self.schema, batches))
            self._ask("BEGIN; INSERT INTO logged FROM reader; DELETE FROM facts")
            self._db.execute("INSERT INTO facts VALUES (?)", [json.dumps([number, self.seen, before, self.left_out])])
            self._ask("COMMIT")

    def _cleaned(self, table: EngineTable, piece: TableReader, before: int, total: int | None) -> Iterator[Any]:
        """Yield the rows to keep. An error is kept, too: the database reports only its text."""
        kinds = dict(zip(self.schema.names, self.schema.types, strict=True))
        try:
            for batch in piece.batches(table.columns):
                rows, left_out = cleaned(table.clean, piece, batch, self.seen - before, before)
                self.left_out.update(left_out)
                self.seen += batch.num_rows
                self.progress("read", batch.num_rows, total)
                yield converted(rows, kinds, piece.name)
        except BaseException as error:
            self._failure = error
            raise

    def _chunks(self, query: str, order: Sequence[str], write: ChunkWriter) -> Iterator[Any]:
        with self._errors():
            found = self._db.sql(f"{query} ORDER BY {', '.join(order)}")
            yield from write(self._watched(lambda: found.to_arrow_reader(_BATCH)))

    def _watched(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call, and report the progress of its query, in rows."""
        told = 0
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            try:
                while not wait([future], _POLL).done:
                    reached = max(told, int(self._db.query_progress() / 100 * self.kept))
                    self.progress("order", reached - told, self.kept)
                    told = reached
            except BaseException:
                self._db.interrupt()
                raise
        self.progress("order", self.kept - told, self.kept)
        return future.result()

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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
