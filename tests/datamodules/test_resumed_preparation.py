"""A killed preparation is resumed, and finished steps are not repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_topk.datamodules import InteractionsDataModule, ListsDataModule
from recsys_topk.datamodules.interactions import preparation as interactions
from recsys_topk.datamodules.lists import preparation as lists
from recsys_topk.datamodules.prepare.base import PreparedDataModule
from recsys_topk.datamodules.prepare.columns import read_columns
from recsys_topk.datamodules.prepare.engine import duck
from recsys_topk.tabular.tables import reader
from recsys_topk.tabular.tables.reader import TableReader

FILES, ROWS, CHUNK, PIECE = 3, 300, 100, 150
FEATURES = {
    "user": {"user": "categorical"},
    "context": {"device": "categorical", "price": "numeric"},
    "items": {"item": "categorical"},
}
KINDS = ["interactions", "lists"]
STEPS = {"interactions": ["read", "sort", "encode"], "lists": ["read", "sort", "encode"], "nested": ["read"]}
KILLED = """
import os, signal, sys
from tests.datamodules.test_resumed_preparation import data_and_tables_read
kind, root, cache, step, number = sys.argv[1:]
seen = 0
def stop(what, more, total, note=""):
    global seen
    seen += what == step and more > 0
    if seen == int(number):
        print(read, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
data, read = data_and_tables_read(kind, root, cache)
data.prepare(stop)
"""


def data_and_tables_read(kind: str, root: str, cache: str) -> tuple[PreparedDataModule, list[int]]:
    """Return a data module with small chunks and pieces, and a list of the first rows of the pieces that it reads."""
    interactions.CHUNK_ROWS = lists.CHUNK_ROWS = CHUNK  # type: ignore[misc]
    reader.PIECE_ROWS = PIECE  # type: ignore[misc]
    read: list[int] = []
    batches = TableReader.batches

    def record(self: TableReader, columns: Any = None) -> Any:
        if self._pieces is None:
            read.append(self.first)
        return batches(self, columns)

    TableReader.batches = record  # type: ignore[method-assign]
    if kind == "interactions":
        return InteractionsDataModule(root, split="leave_last", features=FEATURES, cache_dir=cache), read
    request = {"request": "request"} if kind == "lists" else {}
    return ListsDataModule(root, split="time", duplicates="best", features=FEATURES, cache_dir=cache, **request), read


def write_log(folder: Path, kind: str) -> None:
    """Write shuffled interactions or lists with text and integer ids to several files of two row groups."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    for number in range(FILES):
        columns: dict[str, Any] = {
            "user": [f"u{user}" for user in draw.integers(0, 40, ROWS)],
            "item": draw.integers(0, 60, ROWS),
            "timestamp": draw.integers(0, 10**6, ROWS),
            "device": draw.choice(["tv", "phone"], ROWS),
            "price": draw.normal(size=ROWS),
        }
        if kind == "lists":
            columns |= {
                "request": [f"r{name}" for name in draw.integers(0, 90, ROWS)],
                "label": draw.integers(0, 3, ROWS),
            }
            columns["item"] = [f"i{item}" for item in columns["item"]]
        if kind == "nested":
            length = draw.integers(0, 5, ROWS)
            columns |= {
                "item": [draw.permutation(60)[:n] for n in length],
                "label": [draw.integers(0, 3, n) for n in length],
            }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=ROWS // 2)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableReader, "batches", TableReader.batches)
    monkeypatch.setattr(interactions, "CHUNK_ROWS", interactions.CHUNK_ROWS)
    monkeypatch.setattr(lists, "CHUNK_ROWS", lists.CHUNK_ROWS)
    monkeypatch.setattr(reader, "PIECE_ROWS", reader.PIECE_ROWS)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_preparation_resumes_at_the_unfinished_step(kind: str, tmp_path: Path, warm_python: list[str]) -> None:
    write_log(tmp_path / "log", kind)

    def killed(step: str, number: int) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        told = [kind, str(tmp_path / "log"), str(tmp_path / "cache"), step, str(number)]
        done = subprocess.run([*warm_python, "-c", KILLED, *told], capture_output=True, text=True, env=environment)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(list((tmp_path / "cache").glob(".log-*.partial"))) == 1
        assert not list((tmp_path / "cache").glob("log-*"))
        return done.stdout.strip()

    # The first batch of the first piece is read by every process: it has the types of the columns.
    assert killed("read", 3) == "[0, 0, 150, 300]"
    assert killed("read", 3) == "[0, 300, 450]"  # the first two pieces are one step, then two batches
    assert killed("order", 1) == "[0, 450, 600, 750]"
    assert killed("sort", 4) == "[0]"  # in the fourth chunk
    assert killed("sort", 6) == "[0]"
    assert killed("encode", 2) == "[0]"
    data, read = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "cache"))
    steps: list[tuple[str, int]] = []
    assert data.prepare(lambda what, more, total, note="": steps.append((what, more)))
    assert read == [0]
    assert "order" not in {what for what, _ in steps}
    whole, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "uninterrupted"))
    whole.prepare(lambda what, more, total, note="": steps.append((what, more)))
    told = {step: sum(more for what, more in steps if what == step) for step in ("read", "order", "sort")}
    assert told == {"read": 2 * FILES * ROWS, "order": FILES * ROWS, "sort": 2 * FILES * ROWS}
    (resumed,), (uninterrupted,) = ((tmp_path / name).glob("log-*") for name in ("cache", "uninterrupted"))
    assert content(resumed) == content(uninterrupted)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock"] == [resumed.name]
    assert not data.prepare()


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_threads_does_not_change_the_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log", kind)
    contents = []
    for threads in (1, 2):
        monkeypatch.setattr(duck.os, "cpu_count", lambda threads=threads: threads)
        data, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / str(threads)))
        data.prepare()
        contents.append(content(data.prepared_files().folder))
    assert contents[0] == contents[1]


def test_names_of_columns_may_differ_in_case_and_have_quotes(tmp_path: Path) -> None:
    names = ["device", "Device", 'the "device"']
    columns = {name: [f"{name}{row % 2}" for row in range(18)] for name in names}
    table = pa.table({"user": [1] * 9 + [2] * 9, "item": [*range(9)] * 2, "time": [*range(18)], **columns})
    features = {"user": ["user"], "items": ["item"], "context": dict.fromkeys(names, "categorical")}
    data = InteractionsDataModule(
        interactions=table, split="leave_last", window=1, features=features, cache_dir=str(tmp_path)
    )
    vocabularies = data.encoder.vocabularies
    assert all(
        vocabularies[name].known([f"{name}0", f"{name}1", "other"]).tolist() == [True, True, False] for name in names
    )


def stop_at(step: str, error: type[BaseException] | BaseException) -> Callable[..., None]:
    """Raise in the third part or batch of a step."""
    seen = 0

    def raise_at_step(what: str, more: int, total: int | None, note: str = "") -> None:
        nonlocal seen
        seen += what == step and more > 0
        if seen == 3:
            raise error

    return raise_at_step


@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind, steps in STEPS.items() for step in steps])
def test_interrupted_preparation_is_resumed_and_failed_one_leaves_no_files(
    kind: str, step: str, tmp_path: Path
) -> None:
    write_log(tmp_path / "log", kind)
    data, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "cache"))
    with pytest.raises(KeyboardInterrupt):
        data.prepare(stop_at(step, KeyboardInterrupt))
    assert len(list((tmp_path / "cache").glob(".log-*.partial"))) == 1
    with pytest.raises(ValueError, match="bad data"):
        data.prepare(stop_at(step, ValueError("bad data")))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    with pytest.raises(KeyboardInterrupt):
        data.prepare(stop_at(step, KeyboardInterrupt))
    data, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "cache"))
    assert data.prepare()
    whole, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "uninterrupted"))
    whole.prepare()
    assert content(data.prepared_files().folder) == content(whole.prepared_files().folder)


@pytest.mark.parametrize("kind", ["interactions", "lists"])
def test_preparation_interrupted_while_writing_files_is_resumed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log", kind)
    data, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "cache"))
    module = interactions if kind == "interactions" else lists
    write_columns, written = module.write_columns, 0

    def stopped(*arguments: Any) -> None:
        nonlocal written
        written += 1
        write_columns(*arguments)
        if written == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_columns", stopped)
    with pytest.raises(KeyboardInterrupt):
        data.prepare()
    assert data.prepare()
    whole, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "uninterrupted"))
    whole.prepare()
    assert content(data.prepared_files().folder) == content(whole.prepared_files().folder)


@pytest.mark.parametrize("kind", ["interactions", "lists"])
def test_partial_files_of_an_older_release_are_removed(kind: str, tmp_path: Path) -> None:
    write_log(tmp_path / "log", kind)
    whole, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "uninterrupted"))
    whole.prepare()
    name = whole.prepared_files().folder.name
    for left in (f".{name}.partial/work/piece-0", f".{name}.71-ab.partial"):
        (tmp_path / "cache" / left).mkdir(parents=True)
        (tmp_path / "cache" / left / "facts.json").write_text("old")
    data, _ = data_and_tables_read(kind, str(tmp_path / "log"), str(tmp_path / "cache"))
    assert data.prepare()
    assert content(data.prepared_files().folder) == content(whole.prepared_files().folder)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock") == [name]


def test_prepared_data_of_an_older_version_are_prepared_again_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"user": [1] * 9 + [2] * 9, "item": [*range(9), *range(9)], "time": [*range(18)]})
    old, other = tmp_path / "interactions-0123456789abcdef", tmp_path / "lists-0123456789abcdef"
    for folder in (old, other):
        folder.mkdir()
        (folder / "facts.json").write_text('{"format": 1}')
    with caplog.at_level("INFO"):
        data = InteractionsDataModule(interactions=table, split="leave_last", cache_dir=str(tmp_path))
        data.prepare_data()
    named = [record.message for record in caplog.records if "older version" in record.message]
    assert named == [f"{old} was prepared by an older version and is not used; it can be deleted"]
    files = sorted(data.prepared.folder.glob("*.arrow"))
    assert len(files) >= 8
    for file in files:  # Hugging Face `datasets` opens every prepared file
        assert datasets.Dataset.from_file(str(file)).num_rows == len(next(iter(read_columns(file).values())))
