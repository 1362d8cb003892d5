"""Files written by version 0.1.0 still load, test and resume."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result

Command = Callable[..., Result]
FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"
MEASURED: dict[str, dict[str, float]] = json.loads((FIXTURES / "tests.json").read_text())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def assert_close_rows(found: list[dict[str, str]], expected: list[dict[str, str]]) -> None:
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            if name == "train/requests_per_second":
                continue
            if not value:
                assert not row[name]
            else:
                assert float(row[name]) == pytest.approx(float(value), rel=2e-3, abs=5e-3), (name, wanted["step"])


@pytest.mark.parametrize("run", sorted(MEASURED))
def test_old_checkpoint_gives_the_same_test_metrics(recsys_topk: Command, tmp_path: Path, run: str) -> None:
    checkpoint = FIXTURES / run / "checkpoints" / "last.ckpt"
    done = recsys_topk("test", "--ckpt_path", str(checkpoint), "--out", "runs", "--name", "old")
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = read_csv(tmp_path / "runs" / "test-old" / "metrics.csv")
    for name, value in MEASURED[run].items():
        assert float(row[f"test/{name}"]) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize("run", ["plain", "fused"])
def test_old_run_resumes_to_the_metrics_of_an_uninterrupted_run(recsys_topk: Command, tmp_path: Path, run: str) -> None:
    shutil.copytree(FIXTURES / run, tmp_path / "runs" / run)
    done = recsys_topk("fit", "--resume", f"runs/{run}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = read_csv(tmp_path / "runs" / run / "metrics.csv")
    assert_close_rows(found, read_csv(FIXTURES / f"{run}-uninterrupted.csv"))


def test_old_config_trains_to_the_same_metrics(recsys_topk: Command, tmp_path: Path) -> None:
    done = recsys_topk("fit", "--config", str(FIXTURES / "small.yaml"), "--name", "named")
    assert done.returncode == 0, done.stderr[-2000:]
    assert_close_rows(
        read_csv(tmp_path / "runs" / "named" / "metrics.csv"), read_csv(FIXTURES / "named" / "metrics.csv")
    )
