"""Logged lists from the command line: prepare, fit, test and predict; checkpoints restore the data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import Result
from tests.datamodules.test_lists import funnel

CONFIG = """
data:
  class_path: lists
  root: log.csv
  labels: {shown: 30 - position, ranked: 7, recalled: 5}
  batch_size: 16
model:
  k: 2
  metrics: [joint_recall, {metric: ndcg, k: 3}]
trainer: {enable_progress_bar: false}
"""


def test_funnel_log_is_prepared_trained_tested_and_predicted(
    tmp_path: Path, in_process: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{name: value for name, value in row.items() if name != "history"} for row in funnel(90)]
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows), tmp_path / "log.csv")
    (tmp_path / "lists.yaml").write_text(CONFIG)
    labels = "{shown: 30 - position, ranked: 7, recalled: 5}"
    done = in_process(tmp_path, "prepare", "--data", "lists", "--data.root", "log.csv", "--data.labels", labels)
    assert done.returncode == 0, done.stderr
    assert "request = request_id, user = user_id, item = item_id, stage = stage, position = position" in done.stdout
    assert (
        "features, guessed: user: user_id (categorical); context: device (categorical); items: item_id" in done.stdout
    )
    assert f"{len(rows)} rows; lists: 72 train, 9 val, 9 test" in done.stdout

    fitted = in_process(tmp_path, "fit", "--config", "lists.yaml", "--name", "two")
    assert fitted.returncode == 0, fitted.stderr
    assert "preparing" not in fitted.stdout + fitted.stderr  # already prepared with the same options
    first, last = map(int, re.findall(r"retrieval \(two_tower, (\d+)\) -> ranking \(mlp, (\d+)\)", fitted.stdout)[0])
    assert last <= first < 20  # a half and a quarter of short lists
    saved = yaml.safe_load((tmp_path / "runs" / "two" / "config.yaml").read_text())
    assert [stage["kind"] for stage in saved["model"]["stages"]] == ["two_tower", "mlp"]
    stages = "[{kind: mlp, name: only, quota: 3}]"
    one = in_process(tmp_path, "fit", "--config", "lists.yaml", "--model.stages", stages, "--name", "one")
    assert one.returncode == 0, one.stderr
    assert "\njoint_recall@2@3 " in one.stdout

    checkpoint = str(tmp_path / "runs" / "one" / "checkpoints" / "last.ckpt")
    tested = in_process(tmp_path, "test", "--ckpt_path", checkpoint)
    assert tested.returncode == 0, tested.stderr
    assert "\nonly_ndcg@3 " in tested.stdout
    predicted = in_process(tmp_path, "predict", "--ckpt_path", checkpoint, "--name", "predicted")
    assert predicted.returncode == 0, predicted.stderr
    newest = sorted({(row["timestamp"] - 1_700_000_000) // 60 for row in rows})[-9:]
    expected = sum((row["timestamp"] - 1_700_000_000) // 60 in newest for row in rows)
    found = pq.read_table(tmp_path / "runs" / "predict-predicted" / "predictions.parquet")
    assert found.num_rows == expected
    own = [row for row in rows if (row["timestamp"] - 1_700_000_000) // 60 in newest]
    named = {(row["request_id"], row["user_id"], row["item_id"]) for row in own}
    assert set(zip(*(found[name].to_pylist() for name in ("request_id", "user_id", "item_id")), strict=True)) == named
