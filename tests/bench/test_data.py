from __future__ import annotations

import argparse
import json

import pytest

from recsys_topk.bench import data


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return parser.parse_args(given)


def test_the_suite_measures_both_readers_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LISTS", 64)
    monkeypatch.setattr(data, "_peak", lambda what, where, number: 1.0)
    sizes = ["--users", "40", "--items", "300", "--days", "2", "--requests", "80"]
    result = data.run(arguments(*sizes, "--repeats", "1", "--research-repeats", "1"))
    parts = [row["part"] for row in result.rows]
    assert parts[:4] == ["simulate", "prepare", "open a day", "batch"]
    assert "160 negatives, uniform" in parts
    for row in result.rows[2:8]:
        assert row["ratio"] > 0
    assert json.loads(result.to_json())["suite"] == "data"
    assert "research" in result.text()


def test_too_small_a_world_is_refused() -> None:
    with pytest.raises(ValueError, match="--requests must be at least 1024"):
        data.run(arguments("--requests", "10"))
