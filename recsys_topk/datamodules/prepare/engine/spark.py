"""Spark as the engine of a preparation, for logs that do not fit one machine. It needs Java and pyspark."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from recsys_topk.datamodules.prepare.engine.chunks import value_at, whole_groups
from recsys_topk.datamodules.prepare.engine.duck import NAME, EngineTable, Made, cleaned, converted
from recsys_topk.datamodules.prepare.progress import Progress
from recsys_topk.tabular.tables.columns import one_chunk

if TYPE_CHECKING:
    from typing import Self

_READ: Final = "read"


class SparkEngine:
    """Rows of Parquet tables in Spark. Its methods are those of `DuckEngine`, and so is the result.

    The rows are cleaned, and requests made from sorted rows, by the same numpy code in `mapInArrow`.

    Args:
        folder: The folder to prepare. Files of an interrupted process are removed.
        progress: Receives the progress.
        options: ``master``, ``conf`` (options of the session) and ``work`` (a folder that all executors see; None = in
            `folder`). None = the running session, or a local one.
    """

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
        self.work, self.progress = folder / NAME, progress
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self.work.mkdir()
        self._rows = f"{given.get('work', self.work.resolve().as_uri())}/rows"
        self.left_out: Counter[str] = Counter()
        self.seen = 0
        self.schema: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Remove the work folder if there was no error. The session is kept."""
        if kind is None:
            shutil.rmtree(self.work)

    def read(self, tables: Sequence[EngineTable]) -> int:
        """Read all tables once. Return the number of rows kept."""
        from pyspark.sql.functions import monotonically_increasing_id

        before = 0
        for number, table in enumerate(tables):
            paths, columns = table.reader.parquet, list(dict.fromkeys(table.columns))
            if paths is None:
                raise ValueError(f"engine='spark' reads Parquet files; {table.reader.name} is not one")
            if self.schema is None:
                self.schema = next(table.clean(batch, 0, 0)[0].schema for batch in table.reader.batches(columns))
            counts = self._spark.sparkContext.accumulator(Counter(), _counts())
            frame = self._spark.read.parquet(*paths).select(*columns, monotonically_increasing_id().alias("__place"))
            clean = _Cleaning(table.clean, table.reader.name, before, self.schema, counts)
            named = pa.schema([field.with_name(self._column(field.name)) for field in self.schema])
            made = frame.mapInArrow(clean, _spark_schema(named))
            with _one_line():
                made.write.mode("append" if number else "overwrite").parquet(self._rows)
            rows = counts.value.pop(_READ, 0)
            self.left_out.update(counts.value)
            self.seen += rows
            before += 1 << 50  # rows are numbered by partition
            self.progress("read", rows, None)
        return int(self._frame().count())

    def _frame(self) -> Any:
        return self._spark.read.parquet(self._rows)

    def _column(self, name: str) -> str:
        """Return the name of a column in Spark, where case and dots do not matter."""
        return f"c{self.schema.names.index(name)}"

    def span(self, column: str) -> tuple[int, int]:
        """Return the smallest and the largest value of a column of integers."""
        low, high = self._frame().selectExpr(f"min({self._column(column)})", f"max({self._column(column)})").first()
        return int(low), int(high)

    def distinct(self, column: str) -> Any:
        """Return the distinct values of a column as a pyarrow array, in no particular order."""
        return one_chunk(self._frame().select(self._column(column)).distinct().toArrow().column(0))

    def quantiles(self, column: str, shares: Sequence[float], first_of: str | None = None) -> list[int]:
        """See `DuckEngine.quantiles`."""
        value, frame = self._column(column), self._frame()
        if first_of is not None:
            frame = frame.where(f"{self._column('__split')} < 0").groupBy(self._column(first_of)).agg({value: "min"})
            value = f"`min({value})`"
        frame = frame.selectExpr(f"{value} AS value").cache()
        number, low, high = frame.selectExpr("count(*)", "min(value)", "max(value)").first()

        def count(low: int, width: int, high: int) -> list[tuple[int, int]]:
            buckets = frame.where(f"value BETWEEN {low} AND {high}").selectExpr(
                f"(value - {low}) DIV {width} AS bucket"
            )
            return [(row[0], row[1]) for row in buckets.groupBy("bucket").count().collect()]

        return [value_at(min(int(share * number), number - 1), low, high, count) for share in shares]

    def chunks(
        self,
        ids: Mapping[str, Any],
        order: Sequence[str],
        group: Sequence[str],
        rows: int,
        make: Callable[[Any], Made],
    ) -> Iterator[Made]:
        """See `DuckEngine.chunks`. `make` runs on the executors."""
        frame, names = self._frame(), self.schema.names
        for name, numbered in ids.items():
            known = self._spark.createDataFrame(numbered.rename_columns(["id", "number"]))
            frame = frame.join(known, frame[self._column(name)] == known["id"]).drop(self._column(name), "id")
            frame = frame.withColumnRenamed("number", self._column(name))
        frame = frame.select(*map(self._column, names)).repartitionByRange(*map(self._column, group))
        frame = frame.sortWithinPartitions(*map(self._column, order))
        made = frame.mapInArrow(_Making(make, names, list(group), rows), "chunk binary")
        with _one_line():
            for row in made.toLocalIterator():
                yield pickle.loads(row[0])  # written by the line above


class _Cleaning:
    """Cleans the batches of a partition."""

    def __init__(self, clean: Any, name: str, before: int, schema: Any, counts: Any) -> None:
        self.clean, self.name, self.before, self.counts = clean, name, before, counts
        self.schema = schema.serialize().to_pybytes()

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for batch in batches:
            if batch.num_rows:
                start = batch.column("__place")[0].as_py()
                rows, left_out = cleaned(self.clean, self.name, batch, start, self.before)
                self.counts.add(Counter({_READ: batch.num_rows, **left_out}))
                rows = converted(rows, schema, self.name)
                yield rows.rename_columns([f"c{number}" for number in range(rows.num_columns)])


class _Making:
    """Makes the chunks of a partition, as bytes."""

    def __init__(self, make: Any, names: list[str], group: list[str], rows: int) -> None:
        self.make, self.names, self.group, self.rows = make, names, group, rows

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        named = (batch.rename_columns(self.names) for batch in batches if batch.num_rows)
        for table in whole_groups(named, self.group, self.rows):
            yield pa.record_batch({"chunk": pa.array([pickle.dumps(self.make(table))], pa.binary())})


def _counts() -> Any:
    from pyspark.accumulators import AccumulatorParam

    class Counts(AccumulatorParam):  # type: ignore[misc]
        def zero(self, value: Any) -> Any:
            return Counter()

        def addInPlace(self, value: Any, other: Any) -> Any:  # noqa: N802
            value.update(other)
            return value

    return Counts()


def _spark_schema(schema: Any) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


class _one_line:  # noqa: N801
    """Raise the last line of an error of a Python worker as a ValueError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from pyspark.errors import PySparkException

        if isinstance(error, PySparkException):
            lines = [line for line in str(error).splitlines() if line.startswith("ValueError: ")]
            if lines:
                raise ValueError(lines[-1].removeprefix("ValueError: ")) from error
