"""`bench step`: the baseline gives our scores, and a result can be checked against an earlier one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk.bench import step
from recsys_topk.bench.textbook import Textbook
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cli.bench import main


def test_textbook_form_gives_the_same_scores() -> None:
    torch.manual_seed(0)
    schema = step.random_schema(items=50, users=20)
    module = CascadeModule(schema, loss="dftopk", dim=4)
    batch = step.random_batch(schema, size=6, items=8, length=5)
    for theirs, ours in zip(Textbook(module.cascade, schema)(batch), module(batch), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_result_is_checked_against_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slowness = 1.0

    def measured(function: Any, options: argparse.Namespace, case: str, form: str) -> dict[str, float]:
        return {"ms": 800.0 if form == "textbook" else 100.0 * slowness, "MB": 500.0}

    monkeypatch.setattr(step, "in_own_process", measured)
    target = tmp_path / "step.json"
    assert main(["step", "--json", str(target)]) == 0
    rows = {row["case"]: row for row in json.loads(target.read_text())["rows"]}
    assert rows["train"]["speed-up"] == 8.0
    assert rows["train"]["ratio"] == 0.125
    assert rows[step.LARGE]["ratio"] == 1.0
    assert main(["step", "--check", str(target)]) == 0
    slowness = 2.0
    capsys.readouterr()
    assert main(["step", "--check", str(target)]) == 1
    assert "slower: train, ratio 0.25 against 0.12 (+100%)" in capsys.readouterr().err
