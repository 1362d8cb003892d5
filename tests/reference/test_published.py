"""The published objectives, losses and metrics against values of the published code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recsys_topk import losses
from recsys_topk.cascades.objectives.base import registry
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.losses import DFTopKLoss
from recsys_topk.metrics import RecallAt
from recsys_topk.reference import (
    PublishedARF,
    PublishedARFV2,
    PublishedICC,
    PublishedJoint,
    PublishedJointRecall,
    PublishedRecall,
)
from tests.cascades.test_baseline_objectives import LOSS, lists_with_groups, softplus
from tests.cascades.test_objectives import lists

VECTORS = Path(__file__).parents[1] / "vectors"


@pytest.mark.parametrize(("loss_class", "file"), [(PublishedARF, "loss_arf_kwai"), (PublishedARFV2, "loss_arfv2_kwai")])
def test_arf_with_padding_matches_the_published_code(loss_class: type[PublishedARF], file: str) -> None:
    """The peer calls k support_m and `top` top_k; its w = 1 is log_variance = 0."""
    cases = json.loads((VECTORS / f"{file}.json").read_text())["cases"]
    assert {case["mask"] is None for case in cases} == {True, False}
    for case in cases:
        x = torch.tensor(case["scores"], dtype=torch.float64, requires_grad=True)
        y = torch.tensor(case["labels"], dtype=torch.float64)
        mask = None if case["mask"] is None else torch.tensor(case["mask"], dtype=torch.bool)
        value = loss_class(k=case["support_m"], top=case["top_k"], positive_above=-1.0)(x, y, mask)
        torch.testing.assert_close(value, torch.tensor(case["output"], dtype=torch.float64), atol=1e-9, rtol=1e-9)
        if case["grad_unique"]:
            value.backward()
            torch.testing.assert_close(x.grad, torch.tensor(case["grad"], dtype=torch.float64), atol=1e-9, rtol=1e-9)


def test_published_classes_are_found_by_class_path_only() -> None:
    assert registry.resolve("recsys_topk.reference.PublishedJoint") is PublishedJoint
    assert registry.resolve("joint") is JointObjective
    assert losses.registry.resolve("recsys_topk.reference.PublishedARFV2") is PublishedARFV2


@pytest.mark.parametrize("name", ["neuralsort", "softsort"])
def test_joint_with_padding_matches_the_published_lcron(name: str) -> None:
    file = {"neuralsort": "loss_lcron_neural_sort_kwai", "softsort": "loss_lcron_soft_sort_kwai"}[name]
    stored = json.loads((VECTORS / f"{file}.json").read_text())
    tolerance = stored["suggested_tolerance"]
    for case in stored["cases"]:
        ranking, retrieval = (torch.tensor(case[key], dtype=torch.double) for key in ("scores", "scores2"))
        leaves = [retrieval.requires_grad_(), ranking.requires_grad_()]
        labels = torch.tensor(case["labels"], dtype=torch.double)
        mask = None if case["mask"] is None else torch.tensor(case["mask"]).bool()
        objective = PublishedJoint(losses.get(name), 2, eps=1e-6).double()
        output = objective(leaves, labels, mask, quotas=[case["k"]] * 2, k=case["k"])
        assert output.total.item() == pytest.approx(case["output"], rel=tolerance, abs=tolerance), case["name"]
        if case["grad_unique"]:
            output.total.backward()
            torch.testing.assert_close(ranking.grad, torch.tensor(case["grad"]).double(), rtol=1e-7, atol=1e-8)


def test_joint_includes_padding_for_other_operators() -> None:
    scores, labels, mask = lists(2, seed=6)
    published = PublishedJoint(DFTopKLoss(), 2).double()
    plain = JointObjective(DFTopKLoss(), 2).double()
    one = published(scores, labels, mask, quotas=[4, 3], k=2).total
    two = plain(scores, labels, quotas=[4, 3], k=2).total
    assert one.item() == pytest.approx(two.item(), abs=1e-12)


def test_joint_of_weighted_items_leaves_padding_out() -> None:
    scores, labels, mask = lists(2, seed=6)
    options = {"quotas": [4, 3], "k": 2, "item_weights": 0.5 + torch.rand(labels.shape)}
    one, two = (
        kind(DFTopKLoss(), 2).double()(scores, labels, mask, **options) for kind in (PublishedJoint, JointObjective)
    )
    assert one.total.item() == two.total.item() != 0.0


def test_icc_equals_loop_with_the_published_cuts_and_pairs() -> None:
    """Two stages, no padding: cuts at the first quota twice, all pairs i < j, divided by N^2."""
    scores, labels, _, _ = lists_with_groups(2, seed=4)
    output = PublishedICC(LOSS, 2)(scores, labels, quotas=[6, 4], k=3)
    values = []
    for b in range(5):
        combined = [0.0] * 14
        kappas = [sorted(x[b].tolist(), reverse=True)[5] for x in scores]
        for i in range(14):
            first, last = (
                torch.sigmoid(torch.tensor((x[b, i].item() - kappa) / 1e-3, dtype=torch.double)).item()
                for x, kappa in zip(scores, kappas, strict=True)
            )
            combined[i] = (1 - first) * scores[0][b, i].item() + first * last * scores[1][b, i].item()
        total = 0.0
        for i in range(14):
            for j in range(i + 1, 14):
                z = combined[i] - combined[j]
                total += softplus(z) - z * bool(labels[b, i] > labels[b, j])
        values.append(total / 14**2)
    assert output.total.item() == pytest.approx(sum(values) / 5, abs=1e-9)


def test_recall_divides_by_k_includes_padding_and_averages_batches() -> None:
    metric = PublishedRecall(k=2, m=1)
    # One positive, ranked first among real items but behind padding; hits 0 of k = 2.
    metric.update(torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[True, True, False]]))
    # Three lists: one hit of k = 2, nothing, and no positive at all: (1/2 + 0 + 0) / 3.
    metric.update(
        torch.tensor([[2.0, 1.0, 0.0]] * 3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    )
    assert metric.compute().item() == pytest.approx((0.0 + 0.5 / 3) / 2)
    exact = RecallAt(k=2, m=1)
    exact.update(torch.tensor([[1.0, 0.0, 5.0]]), torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[True, True, False]]))
    assert exact.compute() == 1.0


def test_joint_recall_divides_by_k() -> None:
    metric = PublishedJointRecall(k=4, quotas=(2, 1))
    stages = [torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0]])]
    metric.update(stages, torch.tensor([[0.0, 1.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert metric.compute().item() == pytest.approx(1 / 4)
