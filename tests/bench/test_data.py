from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from recsys_topk.bench import data
from recsys_topk.datamodules import WorldConfig, simulate
from recsys_topk.datamodules.recflow import DayCache, RecFlowFiles


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return parser.parse_args(given)


def test_suite_measures_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LISTS", 64)
    monkeypatch.setattr(data, "in_own_process", lambda function, what, where, number: 1.0)
    sizes = ["--users", "40", "--items", "300", "--days", "2", "--requests", "80"]
    result = data.run(arguments(*sizes, "--repeats", "1"))
    parts = [row["part"] for row in result.rows]
    assert parts[:4] == ["simulate", "prepare", "open a day", "batch"]
    assert "160 negatives, uniform" in parts
    for row in result.rows[2:8]:
        assert row["ratio"] > 0
    assert json.loads(result.to_json())["suite"] == "data"
    assert "ratio 1 = a copy of the tensors of a batch" in result.text()


def test_peak_memory_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "LISTS", 40)
    root = simulate(tmp_path / "world", WorldConfig(users=20, items=200, days=1, requests=50))
    cache = DayCache(RecFlowFiles(root), tmp_path / "cache")
    cache.prepare(cache.files.days)
    folder = str(cache.path(cache.files.days[0]))
    assert data.measure_peak("prepare", str(root), 1) > 10
    for what in ("uniform", "in_batch"):
        assert data.measure_peak(what, folder, 10) >= 0


def test_too_small_world_raises() -> None:
    with pytest.raises(ValueError, match="--requests must be at least 1024"):
        data.run(arguments("--requests", "10"))
