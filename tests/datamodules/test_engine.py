"""The DuckDB engine: progress of a sort, interruptions, memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.datamodules.prepare.engine import duck
from recsys_topk.datamodules.prepare.engine.duck import DuckEngine


def test_progress_is_reported_while_a_query_runs(tmp_path: Path) -> None:
    told = threading.Event()
    with DuckEngine(tmp_path, lambda what, more, total, note="": told.set()) as engine:
        assert engine._watched(lambda: told.wait(60))


def test_query_is_stopped_when_the_progress_is_interrupted(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    engine = DuckEngine(tmp_path, interrupt)
    with pytest.raises(KeyboardInterrupt), engine:
        engine._watched(lambda: engine._ask("SELECT count(*) AS n FROM range(1000000) AS a, range(1000000) AS b"))
    assert engine.work.is_dir()


@pytest.mark.parametrize(
    ("memory", "processors", "found"), [("300MiB", 8, "300"), (None, 8, "256"), (None, 2, "200"), (None, 1, "200")]
)
def test_memory_is_an_option_with_a_default_by_the_machine(
    memory: str | None, processors: int, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duck, "machine_memory", lambda: 1 << 30)
    monkeypatch.setattr(duck.os, "cpu_count", lambda: processors)
    with DuckEngine(tmp_path, lambda *_: None, memory) as engine:
        (limit,) = engine._ask("SELECT current_setting('memory_limit') AS memory").column(0).to_pylist()
        assert limit == f"{found}.0 MiB"


def test_memory_that_cannot_be_read_or_is_too_small_raises_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"memory='much' cannot be used: .*; write e.g. 4GB"):
        DuckEngine(tmp_path, lambda *_: None, "much")
    engine = DuckEngine(tmp_path, lambda *_: None, "1MB")
    with (
        pytest.raises(ValueError, match=r"cannot be sorted: .*; give it more memory: --data.memory 4GB") as raised,
        engine,
    ):
        engine._ask("SELECT list(range) AS numbers FROM range(1000000)")
    assert "\n" not in str(raised.value)
