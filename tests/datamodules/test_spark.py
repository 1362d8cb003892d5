"""Spark prepares the same content as DuckDB."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_topk.datamodules import InteractionsDataModule, ListsDataModule
from recsys_topk.datamodules.interactions import preparation

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


@pytest.mark.long
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
@pytest.mark.parametrize("text", [False, True])
def test_spark_prepares_the_content_of_duckdb(text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setattr(preparation, "CHUNK_ROWS", 200)
    write_log(tmp_path / "log", text)
    split: dict[str, Any] = {"split": "leave_last"} if text else {"split": "time", "weight": "weight"}
    options: dict[str, Any] = {"features": CONTEXT, "window": 3, **split}
    one = InteractionsDataModule(str(tmp_path / "log"), cache_dir=str(tmp_path / "duckdb"), **options)
    two = InteractionsDataModule(
        str(tmp_path / "log"), cache_dir=str(tmp_path / "spark"), engine="spark", spark=SPARK, **options
    )
    one.prepare()
    two.prepare()
    assert one.prepared.folder.name == two.prepared.folder.name
    assert one.prepared.facts == two.prepared.facts
    for table in ("users", "items", "events", "train", "train-positives", "val", "test", "test-positives"):
        found, expected = two.prepared.table(table), one.prepared.table(table)
        assert found.keys() == expected.keys()
        for name, column in expected.items():
            if name == "values":  # means over other chunks
                np.testing.assert_allclose(found[name], column, rtol=1e-5, atol=1e-6)
            else:
                assert np.array_equal(found[name], column), (table, name)
    assert two.prepared.user_ids.tolist() == one.prepared.user_ids.tolist()
    assert two.encoder.vocabularies == one.encoder.vocabularies


@pytest.mark.parametrize("kind", ["lists", "no times"])
def test_spark_refuses_what_it_does_not_prepare(kind: str, tmp_path: Path) -> None:
    table = pa.table({"user": [1, 1], "item": [2, 3], "request": [1, 1], "label": [1, 0]})
    data: Any = (
        ListsDataModule(table, engine="spark", cache_dir=str(tmp_path))
        if kind == "lists"
        else InteractionsDataModule(interactions=table, engine="spark", cache_dir=str(tmp_path))
    )
    with pytest.raises(ValueError, match="engine='spark' prepares interactions with a column of times"):
        data.prepare()
