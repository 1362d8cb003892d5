"""Baselines shown with a run's result, compared with `reference_recalls`, which ranks with NumPy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.cascades import CascadeModule
from recsys_topk.datamodules import RecFlowDataModule, WorldConfig, reference_recalls
from recsys_topk.evaluation import list_baselines
from recsys_topk.evaluation.list_baselines import measure_baselines
from recsys_topk.runs import TrainingRun

WORLD = {"users": 40, "items": 300, "days": 4, "requests": 120}


@pytest.fixture
def data(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> RecFlowDataModule:
    monkeypatch.setenv("RECSYS_TOPK_CACHE", environment["RECSYS_TOPK_CACHE"])
    made = RecFlowDataModule(world=WorldConfig(**WORLD), batch_size=60, eval_negatives=40)
    made.prepare_data()
    return made


def test_popularity_and_oracle_match_numpy_and_random_is_near_its_expectation(data: RecFlowDataModule) -> None:
    found = measure_baselines(CascadeModule(data.schema), data, "test")
    assert found.requests == 120
    names = {"joint_recall@10@20": "joint", "retrieval_recall@10@30": "recall@10@30"}
    for ranker in ("popularity", "oracle"):
        expected = reference_recalls(data, quotas=(30, 20), k=10)[ranker]
        for ours, theirs in names.items():
            assert found.metrics[ranker][ours] == pytest.approx(expected[theirs], abs=1e-6)
    assert found.metrics["random"]["retrieval_recall@10@30"] == pytest.approx(30 / 80, abs=0.05)
    assert list(found.metrics) == ["random", "popularity", "oracle"]


def test_number_of_measured_and_counted_requests_is_limited(
    data: RecFlowDataModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CascadeModule(data.schema)
    assert measure_baselines(model, data, "val", 1).requests == 60
    monkeypatch.setattr(list_baselines, "MEASURED", 50)
    assert measure_baselines(model, data, "val").requests == 60
    whole = measure_baselines(model, data, "val").metrics["popularity"]
    monkeypatch.setattr(list_baselines, "COUNTED", 50)
    assert measure_baselines(model, data, "val").metrics["popularity"] != whole


def test_missing_baselines_are_reported_with_a_reason(
    data: RecFlowDataModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    config: dict[str, Any] = {
        "data": {"world": WORLD, "batch_size": 60, "eval_negatives": 40},
        "trainer": {"limit_train_batches": 1, "enable_progress_bar": False},
        "out": str(tmp_path),
    }
    run = TrainingRun(config, log_line=lines.append)
    run.fit()
    splits = run.data.splits
    monkeypatch.setattr(RecFlowDataModule, "splits", property(lambda self: {**splits, "train": ()}))
    lines.clear()
    run.validate()
    assert "without popularity: there are no training data" in lines[0]
    assert re.search(r"^metric +random +this run +oracle$", lines[1], re.MULTILINE)

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("a loader of the user's")

    monkeypatch.setattr(RecFlowDataModule, "add_negatives", lambda self, batch: batch.plain())
    monkeypatch.setattr("recsys_topk.runs.summary.measure_baselines", broken)
    lines.clear()
    run.validate()
    assert "no baselines: TypeError: a loader of the user's" in lines[0]
    assert re.search(r"^metric +this run$", lines[1], re.MULTILINE)
