"""`bench step`: a case is timed with its baseline, and a result can be checked against an earlier one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.bench import step
from recsys_topk.cli.bench import main


def test_case_is_timed_with_its_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "in_own_process", lambda function, *arguments: function(*arguments))
    target = tmp_path / "step.json"
    sizes = ["--batch_size", "4", "--items", "12", "--history", "3", "--repeats", "1", "--threads", "1"]
    assert main(["step", "--case", "train+25", *sizes, "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())["rows"]
    assert row["case"] == "train+25"
    assert row["ratio"] == pytest.approx(row["ms"] / row["baseline ms"])


def test_result_is_checked_against_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slowness = 1.0

    def measured(function: Any, options: argparse.Namespace, case: str) -> dict[str, float]:
        return {"ms": 100.0 * slowness, "ratio": 0.125 * slowness, "peak MB": 500.0}

    monkeypatch.setattr(step, "in_own_process", measured)
    target = tmp_path / "step.json"
    assert main(["step", "--json", str(target)]) == 0
    rows = {row["case"]: row for row in json.loads(target.read_text())["rows"]}
    assert list(rows) == list(step.CASES)
    assert main(["step", "--check", str(target)]) == 0
    slowness = 2.0
    capsys.readouterr()
    assert main(["step", "--check", str(target)]) == 1
    assert "slower: train, ratio 0.25 against 0.12 (+100%)" in capsys.readouterr().err
