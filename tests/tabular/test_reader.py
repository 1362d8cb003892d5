"""Every table format gives the same rows; invalid tables raise a one-line error."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from recsys_topk.datamodules.lists.nested import flat_rows
from recsys_topk.tabular.tables.reader import open_table

ROWS = [{"user": n % 7, "item": f"i{n % 5}", "price": n / 4 if n % 3 else None} for n in range(50)]


def text(delimiter: str) -> str:
    lines = [delimiter.join("" if value is None else str(value) for value in row.values()) for row in ROWS]
    return "\n".join([delimiter.join(ROWS[0]), *lines]) + "\n"


def in_memory_file_system(folder: Path) -> str:
    with fsspec.open("memory://reading/rows.csv", "w") as file:
        file.write(text(","))
    return "memory://reading/rows.csv"


def parts(folder: Path) -> str:
    for number in range(2):
        pq.write_table(pa.Table.from_pylist(ROWS[25 * number : 25 * number + 25]), folder / f"{number}.parquet")
    return str(folder)


def text_source(name: str, content: str | bytes) -> Callable[[Path], Any]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / name

    return write


def arrow_source(save: Callable[[Any, str], None], name: str) -> Callable[[Path], Any]:
    def write(folder: Path) -> str:
        save(pa.Table.from_pylist(ROWS), str(folder / name))
        return str(folder / name)

    return write


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": arrow_source(pq.write_table, "rows.parquet"),
    "feather": arrow_source(pyarrow.feather.write_feather, "rows.feather"),
    "folder": parts,
    "csv": text_source("rows.csv", text(",")),
    "semicolons": text_source("rows.csv", text(";")),
    "windows": text_source("rows.csv", b"\xef\xbb\xbf" + text(",").replace("\n", "\r\n").encode()),
    "tsv.gz": text_source("rows.tsv.gz", gzip.compress(text("\t").encode())),
    "jsonl": text_source("rows.jsonl", "\n".join(map(json.dumps, ROWS))),
    "address": in_memory_file_system,
    "pandas": lambda folder: pd.DataFrame(ROWS),
    "pandas categories": lambda folder: pd.DataFrame(ROWS).astype({"item": "category"}),
    "polars": lambda folder: pl.DataFrame(ROWS),
    "pyarrow": lambda folder: pa.Table.from_pylist(ROWS),
    "datasets": lambda folder: datasets.Dataset.from_list(ROWS),
    "selected": lambda folder: datasets.Dataset.from_list(ROWS[::-1]).select(range(49, -1, -1)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    reader = open_table(SOURCES[name](tmp_path))
    assert reader.columns == ["user", "item", "price"]
    assert [row for batch in reader.batches() for row in batch.to_pylist()] == ROWS
    assert reader.head(3, ["item"]).to_pylist() == [{"item": row["item"]} for row in ROWS[:3]]


def test_atomic_files_have_types_and_sequences(tmp_path: Path) -> None:
    path = tmp_path / "films.item"
    path.write_text(
        'item_id:token\tclass:token_seq\tx:float_seq\tyear:float\n01\tA B\t1 2.5\t1995\n2\t\t\t\n3\t"C\t3\t7\n'
    )
    with path.open(newline="") as file:
        names = next(csv.reader(file, delimiter="\t"))
    reader = open_table(path)
    assert reader.columns == [name.partition(":")[0] for name in names]
    assert reader.head(9).to_pylist() == [
        {"item_id": "01", "class": ["A", "B"], "x": [1.0, 2.5], "year": 1995.0},
        {"item_id": "2", "class": None, "x": None, "year": None},
        {"item_id": "3", "class": ['"C'], "x": [3.0], "year": 7.0},
    ]


def test_fingerprint_changes_with_the_content(tmp_path: Path) -> None:
    path = text_source("rows.csv", text(","))(tmp_path)
    before = open_table(path).fingerprint()
    assert open_table(path).fingerprint() == before
    path.write_text(text(",") + "1,i1,2\n")
    assert open_table(path).fingerprint() != before
    frame = pd.DataFrame(ROWS)
    assert open_table(frame).fingerprint() == open_table(frame.copy()).fingerprint()
    assert open_table(frame).fingerprint() != open_table(frame.assign(user=0)).fingerprint()


def cut_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "cut.parquet")
    (folder / "cut.parquet").write_bytes((folder / "cut.parquet").read_bytes()[:-9])
    return folder / "cut.parquet"


def damaged_parquet(folder: Path) -> Path:
    path = folder / "inside.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196  # the header of the first page
    path.write_bytes(content)
    return path


def mixed_folder(folder: Path) -> str:
    (folder / "a.csv").write_text("a\n1\n")
    pq.write_table(pa.table({"a": [1]}), folder / "b.parquet")
    return str(folder)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not there": (lambda folder: folder / "nothing.csv", "there is no file or folder"),
    "damaged": (cut_parquet, "cut.parquet cannot be read: .*damaged"),
    "damaged inside": (damaged_parquet, "inside.parquet cannot be read: .*damaged"),
    "no rows": (lambda folder: pa.table({"a": pa.array([], pa.int64())}), "has no rows"),
    "header only": (text_source("a.csv", "user,item\n"), "a.csv has no rows"),
    "empty": (text_source("a.csv", ""), "a.csv has no header line"),
    "no header": (text_source("a.csv", "1,2\n3,4\n"), "begins with '1,2' instead of the names"),
    "ragged": (text_source("a.csv", "user,item\n1,2\n3\n"), "Expected 2 columns, got 1"),
    "mixed types": (text_source("a.jsonl", '{"a": 1}\n{"a": "x"}\n'), "changed from number to string.*mixes types"),
    "mixed objects": (lambda folder: pd.DataFrame({"a": [1, "x"]}), "mixes types"),
    "mixed formats": (mixed_folder, "has files of several formats"),
    "unknown ending": (text_source("model.ckpt", "x"), "has an unknown ending; known: .parquet"),
    "twice": (text_source("a.csv", "user,user\n1,2\n"), "multiple columns named user; rename one"),
    "other type": (lambda folder: 3, "a table must be a path.*got int"),
    "splits": (lambda folder: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "its splits: train"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_tables_raise_one_line(name: str, tmp_path: Path) -> None:
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        list(open_table(make(tmp_path)).batches())
    assert "\n" not in str(caught.value)


def test_column_that_changes_type_late_raises_unless_its_type_is_given(tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    path.write_text("user,item\n" + "1,2\n" * 1_100_000 + "x,3\n")
    with pytest.raises(ValueError, match="invalid value 'x'; a column mixes types"):
        list(open_table(path).batches())
    assert sum(batch.num_rows for batch in open_table(path, {"user": "string"}).batches()) == 1_100_001


def test_errors_in_text_files_name_file_line_and_column(tmp_path: Path) -> None:
    lines = "".join(f"{n},2\n" for n in range(600_000))
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text("user,item\n" + lines)
    messages = {"1,x\n": "column 'item', line 600002: .* invalid value 'x'", "1\n": "line 600002: Expected 2 columns"}
    for line, message in messages.items():
        (tmp_path / "b.csv").write_text("user,item\n" + lines + line)
        with pytest.raises(ValueError, match=f"/b.csv cannot be read: .*{message}"):
            list(open_table(tmp_path).batches())


def test_pieces_are_the_rows_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys_topk.tabular.tables.reader.PIECE_ROWS", 8)
    table = pa.table({"n": range(50), "listed": [[n] * (n % 3) for n in range(50)]})
    for name, rows in {"a": table[:25], "b": table[:0], "c": table[25:]}.items():
        pq.write_table(rows, tmp_path / f"{name}.parquet", row_group_size=5)
    reader = open_table(tmp_path)
    pieces = [pickle.loads(pickle.dumps(piece)) for piece in reader.pieces()]
    assert [piece.head(99).column("n").to_pylist() for piece in pieces] == [
        [*range(start, stop)] for start, stop in ((0, 10), (10, 20), (20, 25), (25, 35), (35, 45), (45, 50))
    ]
    assert [(piece.first, piece.opens) for piece in pieces] == [(0, 0), (10, 0), (20, 0), (25, 25), (35, 25), (45, 25)]
    flat = flat_rows(reader, ["listed"], [])
    assert pa.concat_tables(piece.head(99) for piece in flat.pieces()) == flat.head(99)
    assert flat.head(99).column("row").to_pylist() == [n for n in range(50) for _ in range(n % 3)]
    (whole,) = open_table(table).pieces()
    assert whole.head(99) == table


def test_error_for_missing_column_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="no column 'usr'; did you mean 'user'"):
        open_table(pa.Table.from_pylist(ROWS)).require(["usr"])


def test_text_files_with_different_headers_raise(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item\n1,2\n")
    (tmp_path / "b.csv").write_text("item,user\n2,1\n")
    with pytest.raises(ValueError, match="must have the same header"):
        open_table(tmp_path)


def test_numbers_with_leading_zeros_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('user,item,price\n"007",0,0.5\n7,10,01.5\n')
    assert open_table(tmp_path).head(9).to_pydict() == {"user": ["007", "7"], "item": [0, 10], "price": [0.5, 1.5]}


def test_error_for_text_that_is_not_utf8_names_the_fix(tmp_path: Path) -> None:
    for number, lines in enumerate((1, 5000)):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(b"user,item\n" + b"1,2\n" * lines + "1,é\n".encode("latin-1"))
        with pytest.raises(ValueError, match=rf"{number}\.csv cannot be read.*save it as UTF-8"):
            list(open_table(path).batches())


def test_text_is_read_as_its_batches_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys_topk.tabular.tables.text._BLOCK", 1 << 16)
    rows = 1_000_000
    pa.csv.write_csv(pa.table({"user": np.arange(rows), "item": np.arange(rows)[::-1]}), tmp_path / "a.csv")
    batches = iter(open_table(tmp_path / "a.csv").batches(["user", "item"]))
    before, first = pa.total_allocated_bytes(), next(batches)
    time.sleep(0.5)  # the scan of a data set would go on reading
    assert pa.total_allocated_bytes() - before < 8 * rows  # of 16
    assert first.num_rows + sum(batch.num_rows for batch in batches) == rows
