"""Files written by versions 0.1.0 and 0.2.0 still load, test, resume and serve."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recsys_topk.serving.recommend import CascadeRecommender
from tests.conftest import Result

Command = Callable[..., Result]
FIXTURES = Path(__file__).parent / "fixtures"


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def assert_close_rows(rows: list[dict[str, str]], expected: list[dict[str, str]]) -> None:
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in wanted.items():
            if name == "train/requests_per_second":
                continue
            if not value:
                assert not row[name]
            else:
                assert float(row[name]) == pytest.approx(float(value), rel=2e-3, abs=5e-3), (name, wanted["step"])


@pytest.mark.parametrize("version", ["v0_1", "v0_2"])
def test_old_checkpoints_give_the_same_test_metrics(in_process: Command, tmp_path: Path, version: str) -> None:
    folder = tmp_path / version  # the tables of the checkpoints' data are beside them
    shutil.copytree(FIXTURES / version, folder)
    measured = json.loads((folder / "tests.json").read_text())
    assert len(measured) == 3
    for run, metrics in measured.items():
        done = in_process(folder, "test", "--ckpt_path", f"{run}/checkpoints/last.ckpt", "--name", run)
        assert done.returncode == 0, (run, done.stderr[-2000:])
        (row,) = read_csv(folder / "runs" / f"test-{run}" / "metrics.csv")
        # Since 0.3 the requests of interactions are numbered by user id, so that they have other sampled negatives.
        tolerance = 0.1 if run == "own" else 2e-3
        for name, value in metrics.items():
            assert float(row[f"test/{name}"]) == pytest.approx(value, abs=tolerance), (run, name)


@pytest.mark.parametrize(
    ("run", "uninterrupted"),
    [
        ("v0_1/plain", "v0_1/plain-uninterrupted.csv"),
        ("v0_1/fused", "v0_1/fused-uninterrupted.csv"),
        ("v0_2/stopped", "v0_2/uninterrupted.csv"),
    ],
)
def test_old_run_resumes_to_the_metrics_of_an_uninterrupted_run(
    in_process: Command, tmp_path: Path, run: str, uninterrupted: str
) -> None:
    folder = tmp_path / "runs" / Path(run).name
    shutil.copytree(FIXTURES / run, folder)
    done = in_process(tmp_path, "fit", "--resume", str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    assert_close_rows(read_csv(folder / "metrics.csv"), read_csv(FIXTURES / uninterrupted))


@pytest.mark.parametrize(
    ("config", "metrics"),
    [
        ("v0_1/small.yaml", "v0_1/named/metrics.csv"),
        ("v0_2/small.yaml", "v0_2/uninterrupted.csv"),
        ("v0_2/lists.yaml", "v0_2/lists/metrics.csv"),
    ],
)
def test_old_config_trains_to_the_same_metrics(in_process: Command, tmp_path: Path, config: str, metrics: str) -> None:
    folder = FIXTURES / Path(config).parent
    out = ("--out", str(tmp_path), "--name", "again")
    done = in_process(folder, "fit", "--config", Path(config).name, *out)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_close_rows(read_csv(tmp_path / "again" / "metrics.csv"), read_csv(FIXTURES / metrics))


def test_old_export_and_index_give_the_same_recommendations() -> None:
    folder = FIXTURES / "v0_2"
    expected = json.loads((folder / "recommendations.json").read_text())
    for index in (None, folder / "index"):
        recommender = CascadeRecommender.from_export(folder / "export", index=index)
        for users, answers in zip(expected["requests"], expected["recommendations"], strict=True):
            for items, wanted in zip(recommender.recommend(users), answers, strict=True):
                assert [one.item for one in items] == [item for item, _ in wanted]
                for one, (_, scores) in zip(items, wanted, strict=True):
                    assert one.scores == pytest.approx(scores, rel=1e-4, abs=1e-5)
