"""Spark prepares the same content as DuckDB."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from recsys_topk.datamodules import InteractionsDataModule, ListsDataModule
from recsys_topk.datamodules.interactions import preparation as interactions
from recsys_topk.datamodules.lists import preparation as lists
from recsys_topk.tabular.tables import reader

SPARK = {"master": "local[2]", "conf": {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "3"}}
CONTEXT = {
    "user": ["user"],
    "items": ["item"],
    "history": ["item"],
    "context": {"device": "categorical", "price": "numeric"},
}


def write_log(folder: Path, text: bool) -> None:
    """Write awkward interactions: out of order, with duplicates, tied times and missing values, in three files."""
    draw = np.random.default_rng(int(text))
    number = 1500
    user, item = draw.integers(0, 40, number), draw.integers(0, 80, number)
    columns: dict[str, list[Any]] = {
        "user": [f"u{one}" if one % 7 else str(one) for one in user] if text else user.tolist(),
        "item": [f"i{one}" for one in item] if text else (item - 9).tolist(),
        "timestamp": (1_600_000_000 + 3600 * draw.integers(0, 200, number)).tolist(),
        "weight": draw.integers(0, 4, number).astype(float).tolist(),
        "device": draw.choice(["tv", "phone"], number).tolist(),
        "price": draw.normal(size=number).tolist(),
    }
    for name in ("user", "item", "timestamp", "weight", "price"):
        for row in draw.integers(0, number, 20):
            columns[name][row] = None
    table = pa.table(columns)
    table = pa.concat_tables([table, table.select(table.column_names).slice(0, 100)])
    folder.mkdir()
    for part in range(3):
        pq.write_table(table.slice(540 * part, 540), folder / f"{part}.parquet")


def write_lists(folder: Path, kind: str) -> dict[str, Any]:
    """Write awkward lists to three files of two row groups; return the options of their data module."""
    draw = np.random.default_rng(7)
    number = 600
    start = np.datetime64("2024-01-01", "ns")
    request = draw.integers(0, 90, number)
    length = draw.integers(0, 5, number)
    columns: dict[str, Any] = {
        "request": [f"r{one}" for one in request],
        "item": draw.integers(0, 40, number) - 7,
        "label": draw.integers(0, 3, number),
        "time": start + draw.integers(0, 10**6, number).astype("timedelta64[s]"),
        "user": [f"u{one % 11}" if one % 5 else None for one in request],
        "price": pa.array([None if one % 9 == 0 else one / 7 for one in range(number)]),
        "seen": [[int(one) for one in draw.integers(0, 40, one % 4)] if one % 6 else None for one in request],
        "plot": [draw.normal(size=2).tolist() for _ in range(number)],
        "made": pa.array(draw.integers(0, 10**6, number), pa.timestamp("s", "UTC")),
        "code": pa.array(draw.integers(0, 9, number), pa.uint8()),
        "nothing": pa.nulls(number),
    }
    options: dict[str, Any] = {"history": "seen", "duplicates": "best", "max_list_length": 6, "counts": True}
    options["features"] = {
        "user": ["user"],
        "items": {"item": "categorical", "price": "numeric", "plot": "vector", "code": "categorical",
                  "listed_before": "numeric", "positive_before": "numeric", "seconds_listed": "numeric"},
        "context": {"hour": {"kind": "time", "column": "made"}, "nothing": "categorical"},
        "history": ["item"],
    }  # fmt: skip
    if kind == "rows with stages":
        columns["stage"] = draw.choice(["shown", "ranked", "tested"], number)
        del columns["label"], columns["user"]
        columns["request"] = draw.integers(-5, 90, number)
        options |= {"labels": {"shown": 2, "ranked": 1, "tested": None}, "split": "fraction"}
        options["features"] = {
            "items": {"item": "categorical", "plot": "vector"},
            "context": {"nothing": "categorical"},
        }
    if kind == "published":
        shown = [draw.permutation(40)[: 1 + n] + 100 for n in length]
        columns = {
            "user": columns["user"],
            "article_ids_inview": pa.array(shown, pa.list_(pa.int32())),
            "article_ids_clicked": [own[: n % 3] for own, n in zip(shown, length, strict=True)],
            "time": columns["time"],
        }
        columns["user"] = [one or "u" for one in columns["user"]]
        options = {"counts": True, "val_fraction": 0.2}
    folder.mkdir()
    size = number if kind == "published" else 200  # a published table is one file
    for part in range(number // size):
        rows = pa.table(columns).slice(size * part, size)
        pq.write_table(rows, folder / f"{part}.parquet", row_group_size=100)
    return options


def assert_equal(found: Any, expected: Any) -> None:
    """Compare all prepared files of two data modules."""
    folders = [data.prepared.folder for data in (found, expected)]
    assert folders[0].name == folders[1].name
    assert found.prepared.facts == expected.prepared.facts
    files = [sorted(path.name for path in folder.rglob("*")) for folder in folders]
    assert files[0] == files[1]
    tables = [name.removesuffix(".arrow") for name in files[0] if name.endswith(".arrow")]
    assert len(tables) > 8
    for table in tables:
        one, other = found.prepared.table(table), expected.prepared.table(table)
        assert one.keys() == other.keys()
        for name, column in other.items():
            if name == "values":  # means over other chunks
                np.testing.assert_allclose(one[name], column, rtol=1e-5, atol=1e-6)
            else:
                assert np.array_equal(one[name], column), (table, name)
    assert found.encoder.vocabularies == expected.encoder.vocabularies


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    monkeypatch.setattr(interactions, "CHUNK_ROWS", 200)
    monkeypatch.setattr(lists, "CHUNK_ROWS", 100)
    monkeypatch.setattr(reader, "PIECE_ROWS", 100)


@pytest.mark.long
@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("kind", ["rows", "rows with stages", "published"])
def test_spark_prepares_the_lists_of_duckdb(kind: str, tmp_path: Path) -> None:
    options = write_lists(tmp_path / "log", kind) | {"spark": SPARK}
    one, two = (
        ListsDataModule(str(tmp_path / "log"), cache_dir=str(tmp_path / name), engine=name, **options)
        for name in ("duckdb", "spark")
    )
    one.prepare()
    steps: list[str] = []

    def stop(what: str, more: int, total: int | None, note: str = "") -> None:
        steps.append(what)
        if steps.count("sort") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.prepare(stop)
    assert list((tmp_path / "spark").rglob("000000001.chunk"))
    two.prepare()
    assert_equal(two, one)
    assert not list((tmp_path / "spark").rglob("*work*"))


@pytest.mark.long
@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("kind", ["integers", "text", "no times", "csv"])
def test_spark_prepares_the_interactions_of_duckdb(kind: str, tmp_path: Path) -> None:
    write_log(tmp_path / "log", kind == "text")
    split: dict[str, Any] = {"split": "leave_last"} if kind != "integers" else {"split": "time", "weight": "weight"}
    options: dict[str, Any] = {"features": CONTEXT, "window": 3, **split}
    root = str(tmp_path / ("log.csv" if kind == "csv" else "log"))
    if kind == "csv":
        csv.write_csv(pq.read_table(tmp_path / "log"), root)
    if kind == "no times":
        for path in (tmp_path / "log").iterdir():
            pq.write_table(pq.read_table(path).drop_columns("timestamp"), path, row_group_size=100)
    work = {**SPARK, "work": (tmp_path / "work").as_uri()}
    one, two = (
        InteractionsDataModule(root, cache_dir=str(tmp_path / name), engine=name, spark=work, **options)
        for name in ("duckdb", "spark")
    )
    one.prepare()
    two.prepare()
    assert_equal(two, one)
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.long
@pytest.mark.usefixtures("_small_pieces")
def test_errors_in_spark_name_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for part in range(3):
        rows = {"user": [1, 2] * 100, "item": [*range(200)], "time": [*range(200)], "weight": [1.0] * 200}
        rows["weight"][130] -= 3 * (part == 1)
        pq.write_table(pa.table(rows), tmp_path / "log" / f"{part}.parquet", row_group_size=100)
    data = InteractionsDataModule(
        str(tmp_path / "log"), weight="weight", cache_dir=str(tmp_path / "cache"), engine="spark", spark=SPARK
    )
    with pytest.raises(ValueError, match=r"1.parquet, row 131: column 'weight' has the weight -2;") as raised:
        data.prepare()
    assert "\n" not in str(raised.value)
