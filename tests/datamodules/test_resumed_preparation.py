"""A killed preparation of interactions is resumed, and finished steps are not repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_topk.datamodules import InteractionsDataModule
from recsys_topk.datamodules.interactions import preparation
from recsys_topk.datamodules.reading import TableReader

FILES, ROWS, PARTS = 3, 300, 10
FEATURES = {
    "user": {"user": "categorical"},
    "context": {"device": "categorical", "price": "numeric"},
    "items": {"item": "categorical"},
}

KILLED = """
import os, signal, sys
from tests.datamodules.test_resumed_preparation import data_and_pieces_read
root, cache, step, number = sys.argv[1:]
seen = 0
def stop(what, more, total, note=""):
    global seen
    seen += what == step and more > 0
    if seen == int(number):
        print(read, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
data, read = data_and_pieces_read(root, cache)
data.prepare(stop)
"""


def data_and_pieces_read(root: str, cache: str) -> tuple[InteractionsDataModule, list[int]]:
    """Return a data module with small parts, and a list of the pieces that it reads."""
    preparation.ROWS_PER_PART = FILES * ROWS // (PARTS - 1)  # type: ignore[misc]
    read: list[int] = []
    batches = TableReader.batches

    def record_piece(self: TableReader, columns: Any = None, piece: int | None = None) -> Any:
        if piece is not None:
            read.append(piece)
        return batches(self, columns, piece)

    TableReader.batches = record_piece  # type: ignore[method-assign]
    return InteractionsDataModule(root, split="leave_last", features=FEATURES, cache_dir=cache), read


def write_log(folder: Path) -> None:
    """Write shuffled interactions with text and integer ids to several files of two row groups."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    for number in range(FILES):
        columns = {
            "user": [f"u{user}" for user in draw.integers(0, 40, ROWS)],
            "item": draw.integers(0, 60, ROWS),
            "timestamp": draw.integers(0, 10**6, ROWS),
            "device": draw.choice(["tv", "phone"], ROWS),
            "price": draw.normal(size=ROWS),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=ROWS // 2)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableReader, "batches", TableReader.batches)
    monkeypatch.setattr(preparation, "ROWS_PER_PART", preparation.ROWS_PER_PART)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_killed_preparation_resumes_at_the_unfinished_step(tmp_path: Path) -> None:
    write_log(tmp_path / "log")

    def killed(step: str, number: int) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = [sys.executable, "-c", KILLED, str(tmp_path / "log"), str(tmp_path / "cache"), step, str(number)]
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(list((tmp_path / "cache").glob(".log-*.partial"))) == 1
        assert not list((tmp_path / "cache").glob("log-*"))
        return done.stdout.strip()

    assert killed("read", 3) == "[0, 1, 2]"  # in the third piece of six
    assert killed("sort", 4) == "[2, 3, 4, 5]"  # after the fourth part of ten
    data, read = data_and_pieces_read(str(tmp_path / "log"), str(tmp_path / "cache"))
    steps: list[tuple[str, int]] = []
    assert data.prepare(lambda what, more, total, note="": steps.append((what, more)))
    assert read == []
    sorted_again = [more for what, more in steps if what == "sort"]
    assert sum(sorted_again) == FILES * ROWS
    assert len(sorted_again) == 1 + PARTS - 3  # finished parts at once, then the killed part and those after it
    whole, _ = data_and_pieces_read(str(tmp_path / "log"), str(tmp_path / "uninterrupted"))
    whole.prepare()
    (resumed,), (uninterrupted,) = ((tmp_path / name).glob("log-*") for name in ("cache", "uninterrupted"))
    assert content(resumed) == content(uninterrupted)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock"] == [resumed.name]
    assert not data.prepare()


@pytest.mark.parametrize("step", ["read", "sort", "encode"])
def test_interrupted_preparation_is_resumed_and_failed_one_leaves_no_files(tmp_path: Path, step: str) -> None:
    write_log(tmp_path / "log")
    data, _ = data_and_pieces_read(str(tmp_path / "log"), str(tmp_path / "cache"))

    def stop(error: type[BaseException] | BaseException) -> Any:
        def raise_at_step(what: str, more: int, total: int | None, note: str = "") -> None:
            if what == step:
                raise error

        return raise_at_step

    with pytest.raises(KeyboardInterrupt):
        data.prepare(stop(KeyboardInterrupt))
    assert len(list((tmp_path / "cache").glob(".log-*.partial"))) == 1
    with pytest.raises(ValueError, match="bad data"):
        data.prepare(stop(ValueError("bad data")))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    with pytest.raises(KeyboardInterrupt):
        data.prepare(stop(KeyboardInterrupt))
    assert data.prepare()
    assert data.prepared.facts["interactions"] + data.prepared.facts["left_out"].get("repeated rows", 0) == FILES * ROWS
