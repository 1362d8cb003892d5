"""The five commands of docs/own-data.md, as they stand there, on a CSV of three columns that this test makes."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys_topk import CascadeModule, StageConfig
from recsys_topk.callbacks.corpus import evaluate_corpus
from recsys_topk.datamodules import InteractionsDataModule

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"


def write_clicks(path: Path, users: int = 60, items: int = 90, clicks: int = 24) -> None:
    """Write clicks of users who like one of three kinds of items, which are equally popular."""
    draw = np.random.default_rng(0)
    rows = []
    for user in range(users):
        own = draw.permutation(np.arange(user % 3, items, 3))[:clicks]
        rows += [(int(draw.integers(0, 10**6)), f"u{user},i{item}") for item in own]
    lines = [f"{pair},{1_700_000_000 + time}" for time, pair in sorted(rows)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")


def test_the_five_commands(tmp_path: Path, in_process: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)[:1]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [command[:2] for command in commands] == [
        ["recsys-topk", name] for name in ("schema", "prepare", "fit", "test", "predict")
    ]
    write_clicks(tmp_path / "clicks.csv")
    said = {}
    for command in commands:
        done = in_process(tmp_path, *command[1:])
        assert done.returncode == 0, done.stderr
        said[command[1]] = done.stdout
    assert "user = user_id, item = item_id, time = timestamp" in said["schema"]
    assert "1,440 interactions of 60 users with 90 items" in said["prepare"]
    assert "times: seconds, 2023-11-14 to 2023-11-26" in said["prepare"]
    (measured,) = (tmp_path / "runs").glob("test-*/corpus.json")
    found = json.loads(measured.read_text())["metrics"]
    others = max(found["recall@20/popularity"], found["recall@20/random"])
    assert found["recall@20/corpus"] > 2 * others
    (predictions,) = (tmp_path / "runs").glob("predict-*/predictions.parquet")
    assert pq.read_metadata(predictions).num_rows > 60 * 20


def test_the_script_of_the_peers_measures_popularity_as_the_toolkit_does(
    tmp_path: Path, in_process: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_clicks(tmp_path / "clicks.csv")
    monkeypatch.setitem(sys.modules, "implicit", None)  # not installed
    monkeypatch.setattr(sys, "argv", ["peers_own_data.py", "interactions", str(tmp_path / "clicks.csv")])
    runpy.run_path(str(PAGE.parents[1] / "examples" / "peers_own_data.py"), run_name="__main__")
    missing, val, test = capsys.readouterr().out.splitlines()
    assert missing == "implicit is not installed, its rows are left out: pip install implicit"
    data = InteractionsDataModule(str(tmp_path / "clicks.csv"), split="leave_last")
    model = CascadeModule(data.schema, [StageConfig("two_tower", "only", 20)], k=20)
    for split, line in (("val", val), ("test", test)):
        found = evaluate_corpus(model, data, split, cuts=[20]).compute()  # type: ignore[arg-type]
        expected = [f"{float(found[f'{name}@20/popularity']):.3f}" for name in ("recall", "ndcg")]
        assert line.split()[:2] == [split, "popularity"]
        assert line.split()[3::2] == expected
