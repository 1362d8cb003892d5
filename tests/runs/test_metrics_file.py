"""metrics.csv: new columns, a kill in the middle of a line, and resuming."""

from __future__ import annotations

from pathlib import Path

import torch

from recsys_topk.runs.metrics_file import MetricsFile, read_rows


def test_rows_are_written_at_once_and_new_columns_keep_old_rows(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.log_metrics({"b": torch.tensor(0.1), "epoch": 0}, step=0)
    assert (tmp_path / "metrics.csv").read_text() == f"b,epoch,step\n{torch.tensor(0.1).item()},0,0\n"
    file.log_metrics({"b": 2.0}, step=1)
    file.log_metrics({"a": 3.0}, step=1)
    assert (tmp_path / "metrics.csv").read_text().splitlines()[2:] == [",2.0,,1", "3.0,,,1"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_resume_drops_rows_that_will_be_logged_again(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in range(4):
        file.log_metrics({"x": float(step)}, step=step)
    file.log_metrics({"val": 0.5}, step=3)
    with (tmp_path / "metrics.csv").open("a") as cut:
        cut.write("0.25,4")  # killed while writing
    assert len(read_rows(tmp_path / "metrics.csv")) == 5
    resumed = MetricsFile(tmp_path, keep_before=2)
    assert resumed.dropped == 3
    resumed.log_metrics({"x": 20.0}, step=2)
    assert (tmp_path / "metrics.csv").read_text() == "step,x\n0,0.0\n1,1.0\n2,20.0\n"


def test_resume_before_anything_was_logged(tmp_path: Path) -> None:
    MetricsFile(tmp_path, keep_before=3).log_metrics({"x": 1.0}, step=3)
    assert (tmp_path / "metrics.csv").read_text() == "step,x\n3,1.0\n"
