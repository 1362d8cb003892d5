"""Joint recall as a function of the quotas, and the nearest items of an item."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_topk.evaluation.corpus_metrics import evaluate_corpus
from recsys_topk.evaluation.quotas import QuotaPoint, mark_front, study_quotas
from recsys_topk.serving.index import nearest_items
from recsys_topk.serving.recommend import CascadeRecommender
from tests.evaluation.test_corpus import STAGES, Tiny, make_model


@pytest.mark.parametrize("exact", [True, False], ids=["ties", "no ties"])
def test_every_choice_has_the_recall_of_a_cascade_with_these_quotas(exact: bool) -> None:
    data = Tiny(graded=exact, twins=exact)
    stages = [replace(stage, previous="add" if number == 1 else "ignore") for number, stage in enumerate(THREE)]
    model = make_model(data, stages, exact)
    grid = {"retrieval": (6, 20, 60), "prerank": (4, 9), "ranking": (2, 4, 5)}  # 60 is more than all items
    study = study_quotas(model, data, "test", grid=grid)
    found = {point.quotas: point.recall for point in study.points}
    assert set(found) == {q for q in itertools.product(*grid.values()) if q[0] >= q[1] >= q[2]}
    for quotas, recall in found.items():
        for config, quota in zip(model.cascade.configs, quotas, strict=True):
            object.__setattr__(config, "quota", quota)
        expected = evaluate_corpus(model, data, baselines=False).compute()[f"joint_recall@3@{quotas[-1]}/corpus"]
        assert recall == pytest.approx(expected, abs=1e-9), quotas
    assert len(set(found.values())) > 2  # how many there are depends on rounding


THREE = STAGES["three stages"]


def test_cost_of_a_request_is_the_sum_over_its_stages_and_the_default_grid_has_the_current_quotas() -> None:
    data = Tiny()
    model = make_model(data, THREE, exact=False)
    study = study_quotas(model, data, requests=5)
    assert study.requests <= 8  # one batch
    assert study.items == 45
    assert tuple(model.cascade.quotas) in {point.quotas for point in study.points}
    first, second, third = study.item_costs
    for point in study.points:
        assert point.cost == pytest.approx(45 * first + min(point.quotas[0], 45) * second + point.quotas[1] * third)
        assert max(point.quotas[0], point.quotas[1]) <= 45
    assert [point.cost for point in study.points] == sorted(point.cost for point in study.points)


def test_front_holds_the_points_that_no_other_point_dominates() -> None:
    draw = np.random.default_rng(0)
    points = [QuotaPoint((n,), float(r), float(c)) for n, (r, c) in enumerate(draw.integers(1, 9, (40, 2)))]

    def dominated(one: QuotaPoint) -> bool:
        return any(
            p.recall >= one.recall and p.cost <= one.cost and (p.recall, p.cost) != (one.recall, one.cost)
            for p in points
        )

    marked = mark_front(points)
    values = {(point.recall, point.cost) for point in marked if point.on_front}
    assert values == {(point.recall, point.cost) for point in points if not dominated(point)}


def test_invalid_grids_raise() -> None:
    data = Tiny()
    model = make_model(data, THREE, exact=False)
    with pytest.raises(ValueError, match="no stage 'prernk'; did you mean 'prerank'"):
        study_quotas(model, data, grid={"prernk": [3]})
    with pytest.raises(ValueError, match="at least 1, got 0 for stage 'ranking'"):
        study_quotas(model, data, grid={"ranking": [0]})


def test_command_writes_table_json_and_pictures(
    in_process: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    options = ("--ckpt_path", str(checkpoint), "--out", "out", "--split", "test")
    done = in_process(tmp_path, "quotas", *options, "--grid", "retrieval=20,40,80", "--grid", "preranking=10,20")
    assert done.returncode == 0, done.stderr
    study = json.loads((tmp_path / "out" / "quotas.json").read_text())
    assert len(study["points"]) == 6
    assert study["current"] == [40, 20, 10]
    (current,) = re.findall(r"^ +40 +20 +10 +(\S+) .*now$", done.stdout, re.MULTILINE)
    (point,) = (point for point in study["points"] if point["quotas"] == [40, 20, 10])
    assert float(current) == pytest.approx(point["recall"], abs=5e-5)
    assert "now: 40 -&gt; 20 -&gt; 10" in (tmp_path / "out" / "quotas.svg").read_text()
    assert (tmp_path / "out" / "quotas.png").read_bytes().startswith(b"\x89PNG")
    assert "e.g. retrieval=50,100,200" in in_process(tmp_path, "quotas", *options, "--grid", "retrieval").stderr


def test_similar_items_of_a_checkpoint_are_those_of_its_export(
    in_process: Callable[..., Any], checkpoint: Path, export: Path, tmp_path: Path
) -> None:
    recommender = CascadeRecommender.from_export(export)
    item = str(recommender.items.names[7])
    outputs = [
        in_process(tmp_path, "similar", "--item", item, "--number", "4", *source).stdout
        for source in (("--export", str(export)), ("--ckpt_path", str(checkpoint)))
    ]
    found = [re.findall(r"^ *(\S+) +(-?\d\.\d+)$", output, re.MULTILINE) for output in outputs]
    assert len(found[0]) == 4
    assert [name for name, _ in found[0]] == [name for name, _ in found[1]]
    assert [float(value) for _, value in found[0]] == pytest.approx([float(value) for _, value in found[1]], abs=2e-4)
    missing = in_process(tmp_path, "similar", "--item", "none", "--export", str(export))
    assert (missing.returncode, "the catalogue has no item 'none'" in missing.stderr) == (2, True)


def test_nearest_items_equal_a_loop() -> None:
    vectors = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    vectors[3] = 0.0
    names = np.arange(100, 120)
    for row in (0, 3, 19):
        a = vectors[row].astype(np.float64)
        cosine = {
            int(names[i]): float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) or 1.0))
            for i, b in enumerate(vectors.astype(np.float64))
            if i != row
        }
        expected = sorted(cosine.items(), key=lambda pair: (-round(pair[1], 6), pair[0]))[:6]
        found = nearest_items(vectors, names, int(names[row]), 6)
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-4)
