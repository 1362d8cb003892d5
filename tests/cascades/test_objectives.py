"""Objectives against loops over lists and items, written from the definitions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import CascadeObjective, registry
from recsys_topk.cascades.objectives.independent import IndependentObjective
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.losses import DFTopKLoss, RankingLoss
from recsys_topk.losses import registry as losses
from recsys_topk.spec import build, describe

VECTORS = Path(__file__).parents[1] / "vectors"


def lists(stages: int, seed: int = 0, size: int = 5, items: int = 9) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(size, items, generator=generator, dtype=torch.double) for _ in range(stages)]
    labels = torch.randint(0, 6, (size, items), generator=generator).double()
    mask = torch.rand(size, items, generator=generator) < 0.8
    mask[:, :4] = True
    labels[:, 0] = 5.0
    return [x.requires_grad_() for x in scores], labels, mask


def sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z))


def brute_force_joint(
    scores: list[Tensor], labels: Tensor, mask: Tensor, cuts: list[int], k: int, tau: float
) -> tuple[list[float], float]:
    """Return the terms per stage and the joint term, computed item by item."""
    stage_terms: list[list[float]] = [[] for _ in scores]
    joint_terms = []
    for b in range(labels.shape[0]):
        valid = [i for i in range(labels.shape[1]) if mask[b, i]]
        boundary = sorted((float(labels[b, i]) for i in valid), reverse=True)[k - 1]
        y = {i: float(labels[b, i] > 0 and labels[b, i] >= boundary) for i in valid}
        if k >= len(valid) or sum(y.values()) == 0:
            continue
        memberships = []
        for x, cut in zip(scores, cuts, strict=True):
            ordered = sorted((float(x.detach()[b, i]) for i in valid), reverse=True)
            theta = (ordered[cut - 1] + ordered[cut]) / 2
            memberships.append({i: sigmoid((float(x.detach()[b, i]) - theta) / tau) for i in valid})
        for terms, p in zip(stage_terms, memberships, strict=True):
            terms.append(-sum(y[i] * math.log(p[i]) + (1 - y[i]) * math.log(1 - p[i]) for i in valid) / len(valid))
        survival = {i: math.prod(p[i] for p in memberships) for i in valid}
        joint_terms.append(
            -sum(y[i] * math.log(survival[i]) + (1 - y[i]) * math.log(1 - survival[i]) for i in valid) / len(valid)
        )
    return [sum(terms) / len(terms) for terms in stage_terms], sum(joint_terms) / len(joint_terms)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_joint_equals_loop_for_any_number_of_stages(stages: int) -> None:
    scores, labels, mask = lists(stages)
    objective = JointObjective(DFTopKLoss(tau=0.7), stages).double()
    output = objective(scores, labels, mask, quotas=[4] * stages, k=2)
    terms, joint = brute_force_joint(scores, labels, mask, [2] * stages, 2, 0.7)
    assert [output.terms[f"stage{m}"].item() for m in range(stages)] == pytest.approx(terms, abs=1e-12)
    assert output.terms["joint"].item() == pytest.approx(joint, abs=1e-12)
    assert output.total.item() == pytest.approx(0.5 * sum(terms) + joint, abs=1e-12)


def test_joint_with_quotas_as_stage_k_equals_loop() -> None:
    scores, labels, mask = lists(2, seed=3)
    mask[:] = True
    objective = JointObjective(DFTopKLoss(), 2, weighting="fixed", stage_k="quota").double()
    output = objective(scores, labels, mask, quotas=[5, 3], k=2)
    terms, joint = brute_force_joint(scores, labels, mask, [5, 3], 2, 1.0)
    assert output.total.item() == pytest.approx(sum(terms) + joint, abs=1e-12)


def test_joint_gradient_matches_finite_differences() -> None:
    scores, labels, mask = lists(2, seed=1)
    objective = JointObjective(DFTopKLoss(tau=0.5), 2).double()
    assert torch.autograd.gradcheck(
        lambda *x: objective(x, labels, mask, quotas=[4, 3], k=2).total, tuple(scores), atol=1e-6
    )


def test_learned_weights_follow_their_formula() -> None:
    scores, labels, mask = lists(2)
    objective = JointObjective(DFTopKLoss(), 2).double()
    with torch.no_grad():
        objective.weights.log_variance.copy_(torch.tensor([0.4, -1.3], dtype=torch.double))
    output = objective(scores, labels, mask, quotas=[4, 3], k=2)
    terms = [output.terms[f"stage{m}"].item() for m in range(2)]
    expected = sum(t * math.exp(-w) / 2 + w / 2 for t, w in zip(terms, [0.4, -1.3], strict=True))
    assert output.total.item() == pytest.approx(expected + output.terms["joint"].item(), abs=1e-12)


def test_independent_is_the_sum_of_the_losses() -> None:
    scores, labels, mask = lists(3)
    loss = DFTopKLoss(tau=0.3)
    output = IndependentObjective(loss, 3)(scores, labels, mask, quotas=[4, 4, 3], k=2)
    assert output.total.item() == pytest.approx(sum(float(loss(x, labels, mask, k=2)) for x in scores), abs=1e-12)


@pytest.mark.parametrize("name", ["joint", "independent"])
def test_extreme_scores_stay_finite(name: str) -> None:
    scores, labels, mask = lists(2)
    extreme = [(x.detach().float() * 1e4).requires_grad_() for x in scores]
    output = registry.resolve(name)(DFTopKLoss(tau=0.01), 2)(extreme, labels.float(), mask, quotas=[4, 3], k=2)
    output.total.backward()
    assert torch.isfinite(output.total)
    assert all(torch.isfinite(x.grad).all() for x in extreme)


def test_lists_without_positives_are_skipped() -> None:
    scores, labels, mask = lists(2)
    labels[1] = 0.0
    mask[2, 2:] = False
    kept = torch.tensor([0, 3, 4])
    objective = JointObjective(DFTopKLoss(), 2).double()
    whole = objective(scores, labels, mask, quotas=[4, 3], k=2)
    part = objective([x[kept] for x in scores], labels[kept], mask[kept], quotas=[4, 3], k=2)
    assert float(whole.total) == pytest.approx(float(part.total), abs=1e-12)
    nothing = objective(scores, torch.zeros_like(labels), mask, quotas=[4, 3], k=2)
    nothing.total.backward()
    assert float(nothing.total) == 0.0
    assert all(float(x.grad.abs().max()) == 0.0 for x in scores)


@pytest.mark.parametrize("name", ["dftopk", "lapsum"])
def test_lists_of_no_items_with_item_weights_give_zero(name: str) -> None:
    scores = [torch.zeros(3, 0, requires_grad=True) for _ in range(2)]
    empty = torch.zeros(3, 0)
    output = JointObjective(losses.get(name), 2)(scores, empty, quotas=(3, 2), k=2, item_weights=empty)
    output.total.backward()
    assert float(output.total.detach()) == 0.0


def test_joint_with_a_loss_without_operator_raises() -> None:
    class NoOperator(DFTopKLoss):
        def __init__(self) -> None:
            super().__init__()
            self.operator = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="use --objective independent"):
        JointObjective(NoOperator(), 2)


def test_wrong_number_of_stages_raises() -> None:
    scores, labels, mask = lists(3)
    with pytest.raises(ValueError, match="built for 2 stages, got 3 score tensors"):
        JointObjective(DFTopKLoss(), 2)(scores, labels, mask, quotas=[4, 3, 2], k=2)


def test_description_rebuilds_the_objective() -> None:
    objective = JointObjective(DFTopKLoss(tau=3.0, k=5), 2, stage_k="quota", weighting="fixed")
    loss = build(describe(objective.loss), base=RankingLoss)
    again = build(describe(objective, exclude=("loss", "stages")), loss, 2, base=CascadeObjective)
    assert isinstance(again, JointObjective)
    assert (again.stage_k, again.weights.log_variance, again.loss.operator.tau, again.loss.k) == ("quota", None, 3.0, 5)


@pytest.mark.parametrize("name", [name for name in losses.available() if losses.get(name).operator is not None])
def test_every_loss_with_an_operator_trains_jointly(name: str) -> None:
    scores, labels, mask = lists(3, seed=4, items=12)
    objective = JointObjective(losses.get(name), 3).double()
    leaves = [x.detach().requires_grad_() for x in scores]
    output = objective(leaves, labels, mask, quotas=[6, 5, 4], k=3)
    gradients = torch.autograd.grad(output.total, leaves)
    assert torch.isfinite(output.total)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert any(bool((g != 0).any()) for g in gradients)
    assert all(bool((g[~mask] == 0).all()) for g in gradients)


@pytest.mark.parametrize("name", ["neuralsort", "softsort"])
def test_joint_with_a_permutation_operator_matches_the_published_lcron(name: str) -> None:
    """Unmasked cases. The peer's labels are distinct and start at 0, so positive_above = -1 gives its top k."""
    file = {"neuralsort": "loss_lcron_neural_sort_kwai", "softsort": "loss_lcron_soft_sort_kwai"}[name]
    stored = json.loads((VECTORS / f"{file}.json").read_text())
    checked = 0
    for case in stored["cases"]:
        if case["mask"] is not None:
            continue
        ranking, retrieval = (torch.tensor(case[key], dtype=torch.double) for key in ("scores", "scores2"))
        leaves = [retrieval.requires_grad_(), ranking.requires_grad_()]
        labels = torch.tensor(case["labels"], dtype=torch.double)
        objective = JointObjective(losses.get(name, eps=1e-6, positive_above=-1.0), 2, eps=1e-6).double()
        output = objective(leaves, labels, quotas=[case["k"]] * 2, k=case["k"])
        terms = {"stage1": "l_relax_prerank", "stage0": "l_relax_recall", "joint": "l_joint"}
        tolerance = stored["suggested_tolerance"]
        for ours, theirs in terms.items():
            assert output.terms[ours].item() == pytest.approx(case[theirs], rel=tolerance, abs=tolerance), case["name"]
        assert output.total.item() == pytest.approx(case["output"], rel=tolerance, abs=tolerance)
        if case["grad_unique"]:
            output.total.backward()
            for x, key in ((ranking, "grad"), (retrieval, "grad2")):
                torch.testing.assert_close(
                    x.grad, torch.tensor(case[key], dtype=torch.double), rtol=1e-8, atol=tolerance
                )
        checked += 1
    assert checked == 3
