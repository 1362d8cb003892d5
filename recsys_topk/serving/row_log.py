"""A log of rows as Parquet files, written in a thread that never delays the caller."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from recsys_topk.files import whole_file

log = logging.getLogger(__name__)

_CHUNK: Final = 256
_LOOK: Final = 0.2

Row = TypeVar("Row")


class RowLog(Generic[Row]):
    """Writes rows to Parquet files in a thread. Adding a row takes microseconds and never waits.

    Rows are dropped and counted if too many wait, e.g. for a slow disk, or if a file cannot be written. A file is
    complete when it appears; its name has the time, the process and a random part, so that processes share a folder.

    Args:
        folder: The folder; it is created.
        tables: Makes tables from rows. Tables with different columns go to different files.
        count: Called with ``"written"`` or ``"dropped"`` and a number of rows.
        queue: Number of rows that may wait.
        seconds: Seconds after which a file is written.
        nbytes: Size in memory at which a file is written.
    """

    def __init__(
        self,
        folder: str | Path,
        tables: Callable[[Sequence[Row]], Iterable[Any]],
        count: Callable[[str, int], object],
        *,
        queue: int = 4096,
        seconds: float = 60.0,
        nbytes: int = 64 << 20,
    ) -> None:
        self.folder, self._tables, self._count = Path(folder), tables, count
        self._most, self._seconds, self._bytes = queue, seconds, nbytes
        self._rows: deque[Row] = deque()
        self._pending: list[Any] = []
        self._since = time.monotonic()
        self._named = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._files = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, rows: Sequence[Row]) -> bool:
        """Add rows, all or none. Return whether there was room."""
        room = len(self._rows) + len(rows) <= self._most and not self._stopping.is_set()
        if room:
            self._rows.extend(rows)
        else:
            self._count("dropped", len(rows))
        return room

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float = 20.0) -> None:
        """Write what waits, at most for some seconds."""
        self._stopping.set()
        self._thread.join(seconds)
        self._count("dropped", len(self._rows))

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stopping.wait(_LOOK)
            while self._rows:
                self._take([self._rows.popleft() for _ in range(min(_CHUNK, len(self._rows)))])
            if last or time.monotonic() - self._since >= self._seconds:
                self._write()

    def _take(self, rows: Sequence[Row]) -> None:
        try:
            tables = list(self._tables(rows))
        except Exception:  # a row that cannot be logged must not end the log
            log.exception("rows cannot be logged")
            self._count("dropped", len(rows))
            return
        for table in tables:
            if self._pending and not self._pending[0].schema.equals(table.schema):
                self._write()
            self._since = self._since if self._pending else time.monotonic()
            self._pending.append(table)
            if sum(one.nbytes for one in self._pending) >= self._bytes:
                self._write()

    def _write(self) -> None:
        tables, self._pending, self._since = self._pending, [], time.monotonic()
        if not tables:
            return
        table = pa.concat_tables(tables)
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{self._named}-{self._files:05}.parquet"
        self._files += 1
        try:
            with whole_file(self.folder / name) as file:
                pq.write_table(table, file, compression="zstd")
            self._count("written", table.num_rows)
        except Exception as error:
            log.error("%d rows of the log %s are lost: %s", table.num_rows, self.folder, error)
            self._count("dropped", table.num_rows)
