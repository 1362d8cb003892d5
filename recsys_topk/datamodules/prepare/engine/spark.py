"""Spark as the engine of a preparation, for logs that do not fit one machine. It needs Java and pyspark."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa

from recsys_topk.datamodules.prepare.engine.base import Engine, EngineTable, cleaned
from recsys_topk.datamodules.prepare.engine.chunks import ChunkWriter, converted
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.files import write_whole
from recsys_topk.tabular.tables.columns import is_list, is_text

_READ: Final = "read"
_PIECE_ROWS: Final = 1 << 36
"""More than the rows of a piece: rows are numbered by piece if the sizes of the pieces are not known."""


class SparkEngine(Engine):
    """Rows of tables in Spark. The pieces of a table are read in parallel; they are row groups of Parquet files.

    The rows are read and cleaned, and requests made from sorted rows, by the same code as with `DuckEngine`.

    Args:
        folder: See `Engine`.
        progress: See `Engine`.
        options: ``master``, ``conf`` (options of the session) and ``work`` (a folder that all executors see; None = in
            `folder`). None = the running session, or a local one.
    """

    name: ClassVar[str] = "spark"
    whole_division: ClassVar[str] = "DIV"

    def __init__(self, folder: Path, progress: Progress, options: Mapping[str, Any] | None = None) -> None:
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise ValueError("engine='spark' needs pyspark; install recsys-topk[spark], and Java 17") from error
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        given = dict(options or {})
        builder = SparkSession.builder.appName("recsys-topk prepare").config("spark.sql.session.timeZone", "UTC")
        builder = builder.master(given["master"]) if "master" in given else builder
        for name, value in given.get("conf", {}).items():
            builder = builder.config(name, value)
        self._spark = builder.getOrCreate()
        super().__init__(folder, progress)
        self._rows = f"{given.get('work', self.work.resolve().as_uri())}/{folder.name.strip('.')}"

    def _close(self, ended: bool) -> None:
        """See `Engine`. The session is kept."""
        if ended:
            path = self._spark._jvm.org.apache.hadoop.fs.Path(self._rows)
            path.getFileSystem(self._spark._jsc.hadoopConfiguration()).delete(path, True)

    def _ask(self, query: str) -> Any:
        return self._spark.sql(query).toArrow()

    def _add(self, name: str, table: Any) -> None:
        table = table.read_all() if isinstance(table, pa.RecordBatchReader) else table
        self._spark.createDataFrame(table).createOrReplaceTempView(name)

    def _fill(self, tables: Sequence[EngineTable], total: int | None) -> None:
        """See `Engine`."""
        done = self.work / "facts.json"
        if not done.is_file():
            counts = self._read(tables)
            write_whole(done, json.dumps(counts))
        self.left_out.update(json.loads(done.read_text(encoding="utf-8")))
        self.seen = self.left_out.pop(_READ, 0)
        self.progress("read", self.seen, total)
        self._spark.read.parquet(self._rows).createOrReplaceTempView("logged")

    def _read(self, tables: Sequence[EngineTable]) -> Counter[str]:
        from pyspark import cloudpickle
        from pyspark.accumulators import AddingAccumulatorParam
        from pyspark.sql.pandas.types import from_arrow_schema

        pieces, before = [], 0
        for number, table in enumerate(tables):
            own = table.reader.pieces()
            for place, piece in enumerate(own):
                start = place * _PIECE_ROWS if table.reader.rows is None else piece.first
                pieces.append((number, start, before, cloudpickle.dumps(piece)))
            before += len(own) * _PIECE_ROWS if table.reader.rows is None else table.reader.rows
        context = self._spark.sparkContext
        counts: Any = context.accumulator(Counter(), AddingAccumulatorParam(Counter()))
        kinds = dict(zip(self.schema.names, self.schema.types, strict=True))
        stored = {self._column(name): _stored(kind) for name, kind in kinds.items()}
        plain = [(list(table.columns), table.clean) for table in tables]

        def read(batches: Iterator[Any]) -> Iterator[Any]:
            for row in (row for batch in batches for row in batch.to_pylist()):
                piece, start = pickle.loads(row["piece"]), row["start"]  # written by the driver
                columns, clean = plain[row["number"]]
                for batch in piece.batches(columns):
                    rows, left_out = cleaned(clean, piece, batch, start, row["before"])
                    start += batch.num_rows
                    counts.add(Counter({_READ: batch.num_rows, **left_out}))
                    yield converted(converted(rows, kinds, piece.name), stored)

        rows = context.parallelize(pieces, len(pieces)).toDF("number int, start long, before long, piece binary")
        with _one_line():
            made = rows.mapInArrow(read, from_arrow_schema(pa.schema(stored)))
            made.write.mode("overwrite").parquet(self._rows)
        return Counter(counts.value)

    def _chunks(self, query: str, order: Sequence[str], write: ChunkWriter) -> Iterator[Any]:
        def make(batches: Iterator[Any]) -> Iterator[Any]:
            for chunk in write(batches):
                yield pa.record_batch({"chunk": pa.array([chunk.to_pybytes()], pa.binary())})

        with _one_line():
            rows = self._spark.sql(query).repartitionByRange(order[0]).sortWithinPartitions(*order)
            yield from (row[0] for row in rows.mapInArrow(make, "chunk binary").toLocalIterator())


def _stored(kind: Any) -> Any:
    """Return the Arrow type in which Spark stores a type: integers for times, which it changes, lists for vectors."""
    if is_list(kind):
        return pa.list_(_stored(kind.value_type))
    if is_text(kind):
        return pa.string()
    if pa.types.is_temporal(kind) and kind.bit_width == 32:
        return pa.int32()
    if pa.types.is_temporal(kind) or pa.types.is_unsigned_integer(kind) or pa.types.is_null(kind):
        return pa.int64()
    return pa.float32() if pa.types.is_float16(kind) else kind


@contextmanager
def _one_line() -> Iterator[None]:
    """Raise the last line of an error of a Python worker, or the first line of another one, as a ValueError."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        lines = str(error).splitlines()
        told = [line.removeprefix("ValueError: ") for line in lines if line.startswith("ValueError: ")]
        raise ValueError(told[-1] if told else f"Spark: {lines[0]}") from error
