"""The compiled joint objective against the path through the operator in float64, and against a loop over items."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recsys_topk import losses
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.ops.dispatch import backend, installed
from tests.ops.test_topk_loss import solve

pytestmark = pytest.mark.skipif(not installed("numba"), reason="the compiled kernels need numba")

NAMES = ["dftopk", "sigmoid", "lapsum", "sparse"]
QUOTAS = (9, 4)


def lists() -> tuple[Tensor, Tensor, Tensor]:
    """Two stages of seven lists with ties; one list is shorter than k, one has no positive, one no valid item."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 7, 21, generator=generator)
    scores[..., 5:9] = scores[..., :4]
    labels = torch.randint(0, 4, (7, 21), generator=generator).float()
    mask = torch.rand(7, 21, generator=generator) > 0.3
    mask[1, 2:], mask[2], mask[6, 8:] = False, False, False  # the last is shorter than the first quota
    labels[3] = 0.0
    return scores, labels, mask


def terms_and_gradients(
    objective: JointObjective, scores: Tensor, labels: Tensor, mask: Tensor | None, dtype: torch.dtype
):
    leaves = [x.to(dtype).requires_grad_() for x in scores]
    output = objective(leaves, labels.to(dtype), mask, quotas=QUOTAS, k=3)
    (output.total + 0.3 * output.terms["stage1"]).backward()
    return [one.detach().double() for one in (*output.terms.values(), *(x.grad for x in leaves))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [None, 4, "positives"])
@pytest.mark.parametrize("stage_k", ["k", "quota"])
def test_objective_is_fused_and_equals_the_path_through_the_operator(name, k, stage_k, monkeypatch):
    scores, labels, mask = lists()
    objective = JointObjective(losses.get(name, k=k, tau=1.5), 2, weighting="fixed", stage_k=stage_k)
    cases = [(scores, None), (scores.masked_fill(~mask, 7.0), mask)]
    with monkeypatch.context() as patch:
        patch.setattr("recsys_topk.cascades.objectives.joint.law_of", lambda _: None)
        expected = [terms_and_gradients(objective, x, labels, real, torch.float64) for x, real in cases]

    def fail(*_):
        raise AssertionError("the operator was called")

    monkeypatch.setattr(objective.loss.operator, "select", fail)
    with backend("numba"):
        found = [terms_and_gradients(objective, x, labels, real, torch.float32) for x, real in cases]
    # A clipped membership is a difference of scores, and 1 / p amplifies its rounding.
    torch.testing.assert_close(found, expected, rtol=1e-4 if name == "sparse" else 2e-5, atol=1e-6)
    assert not found[1][-1][~mask].any()


def test_objective_of_sparse_equals_loop_over_items():
    scores, labels, mask = lists()
    tau, k, stages, joint = 1.5, 3, [[], []], []
    for b in range(len(labels)):
        items = mask[b].nonzero()[:, 0].tolist()
        grades = [labels[b, i].item() for i in items]
        if k >= len(items) or max(grades) == 0.0:
            continue
        reach = sorted(grades, reverse=True)[k - 1]
        true = [grade > 0 and grade >= reach for grade in grades]
        survival = [1.0] * len(items)
        for m, terms in enumerate(stages):
            x = [scores[m, b, i].item() / tau for i in items]
            t = solve(lambda t, x=x: sum(min(max(v - t, 0.0), 1.0) for v in x), k, min(x) - 2, max(x) + 2)
            p = [min(max(v - t, 1e-6), 1 - 1e-6) for v in x]
            survival = [s * one for s, one in zip(survival, p, strict=True)]
            terms.append(-sum(math.log(one if y else 1 - one) for one, y in zip(p, true, strict=True)) / len(x))
        joint.append(-sum(math.log(s if y else 1 - s) for s, y in zip(survival, true, strict=True)) / len(items))
    assert len(joint) == 4
    with backend("numba"):
        output = JointObjective(losses.get("sparse", tau=tau), 2)(list(scores), labels, mask, quotas=QUOTAS, k=k)
    expected = [sum(terms) / len(terms) for terms in (*stages, joint)]
    assert [one.item() for one in output.terms.values()] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_match_the_reference(name):
    scores, labels, mask = lists()
    objective, found = JointObjective(losses.get(name, tau=1.5), 2), []
    for mode in ("numba", "torch"):
        leaves = [x.clone().requires_grad_() for x in scores]
        with backend(mode):
            total = objective(leaves, labels, mask, quotas=QUOTAS, k=3).total
            slopes = torch.autograd.grad(total, leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(x.square().sum() for x in slopes), leaves))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert any(x.any() for x in found[0])


@pytest.mark.parametrize("name", NAMES)
def test_scores_that_are_not_finite_use_the_reference(name):
    scores, labels, _ = lists()
    scores[1, 0, 2] = math.nan
    objective, found = JointObjective(losses.get(name), 2), []
    for mode in ("numba", "torch"):
        with backend(mode):
            found.append(objective(list(scores), labels, quotas=QUOTAS, k=3).terms)
    torch.testing.assert_close(found[0], found[1], equal_nan=True)
