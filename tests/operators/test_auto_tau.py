"""tau="auto": the temperature is the standard deviation of the scores in the first training batches."""

from __future__ import annotations

import pytest
import torch

from recsys_topk import losses, operators
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.losses import DFTopKLoss, LapSumLoss
from recsys_topk.losses.base import RankingLoss
from recsys_topk.operators.score_scale import BATCHES
from recsys_topk.ops import backend
from recsys_topk.spec import build, describe
from recsys_topk.testing.lists import ragged

LISTS = ragged().to(torch.float32)
X, Y, MASK = LISTS.scores, LISTS.labels, LISTS.mask


def deviation(*scores: torch.Tensor) -> float:
    """Return the standard deviation of the valid scores around the mean of their list, by a loop."""
    apart = [x[row] - x[row].mean() for one in scores for x, row in zip(one.double(), MASK, strict=True)]
    return float(torch.cat(apart).square().mean() ** 0.5)


def training(scores: torch.Tensor) -> torch.Tensor:
    return scores.clone().requires_grad_()


@pytest.mark.parametrize("mode", ["auto", "torch"])
@pytest.mark.parametrize("name", ["dftopk", "sigmoid", "lapsum", "neuralsort"])
def test_rows_and_flat_lists_of_a_loss_give_the_deviation_as_tau(name: str, mode: str) -> None:
    rows, flat = losses.get(name, tau="auto", k=2), losses.get(name, tau="auto", k=2)
    with backend(mode):
        value = rows(training(0.01 * X), Y, MASK)
        again = flat(training(0.01 * X[MASK]), Y[MASK], lengths=MASK.sum(1))
    assert rows.operator is not None
    assert flat.operator is not None
    assert rows.operator.tau == pytest.approx(deviation(0.01 * X), rel=1e-6)
    assert flat.operator.tau == pytest.approx(rows.operator.tau, rel=1e-6)
    assert value.item() == pytest.approx(again.item(), rel=1e-5)
    assert value.item() == pytest.approx(losses.get(name, tau=deviation(X), k=2)(X, Y, MASK).item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["auto", "torch"])
def test_all_stages_of_the_joint_objective_count_once(mode: str) -> None:
    objective = JointObjective(DFTopKLoss(tau="auto"), 2)
    with backend(mode):
        objective([training(X), training(3 * X)], Y, MASK, quotas=[3, 2], k=2)
    operator = objective.loss.operator
    assert operator is not None
    assert operator.tau == pytest.approx(deviation(X, 3 * X), rel=1e-6)
    assert operator.tau_state is not None
    assert operator.tau_state[1] == 1


def test_tau_is_the_mean_variance_of_the_first_training_batches() -> None:
    loss = LapSumLoss(tau="auto", k=2)
    variances = []
    for batch in range(1, BATCHES + 4):
        loss(training(batch * X), Y, MASK)
        variances.append(deviation(batch * X) ** 2)
    expected = (sum(variances[:BATCHES]) / BATCHES) ** 0.5
    assert loss.operator.tau == pytest.approx(expected, rel=1e-5)
    assert not loss.operator.measures_tau
    other = build(describe(loss), base=RankingLoss)
    other.load_state_dict(loss.state_dict())
    assert other.operator is not None
    assert other.operator.tau == pytest.approx(expected, rel=1e-5)
    assert not other.operator.measures_tau


def test_batches_that_do_not_train_use_tau_but_do_not_change_it() -> None:
    loss = DFTopKLoss(tau="auto", k=2)
    loss(0.1 * X, Y, MASK)  # nothing is stored: the deviation of this batch
    assert loss.operator.tau == pytest.approx(deviation(0.1 * X), rel=1e-6)
    loss(training(X), Y, MASK)
    fixed = loss.operator.tau
    with torch.no_grad():
        loss(training(5 * X), Y, MASK)
    loss.eval()(training(5 * X), Y, MASK)
    loss(5 * X, Y, MASK)
    assert loss.operator.tau == fixed == pytest.approx(deviation(X), rel=1e-6)


def test_equal_scores_keep_the_default() -> None:
    loss = DFTopKLoss(tau="auto", k=2)
    loss(training(torch.zeros_like(X)), Y, MASK)
    assert loss.operator.tau == 1.0


@pytest.mark.parametrize("name", ["hard", "sinkhorn"])
def test_operators_whose_membership_does_not_scale_refuse(name: str) -> None:
    with pytest.raises(ValueError, match=f"the {name!r} operator does not support tau='auto'"):
        operators.get(name, tau="auto")


def test_transforms_need_a_measured_temperature() -> None:
    loss = DFTopKLoss(tau="auto", k=2)
    with pytest.raises(RuntimeError, match="measured on 10 training batches in eager mode"):
        torch.func.grad(lambda x: loss(x, Y, MASK))(X)
    for _ in range(BATCHES):
        loss(training(X), Y, MASK)
    assert torch.isfinite(torch.func.grad(lambda x: loss(x, Y, MASK))(X)).all()


def test_a_state_dict_without_auto_has_no_new_keys() -> None:
    assert list(DFTopKLoss(k=2).state_dict()) == []
    assert "tau=auto" in repr(DFTopKLoss(tau="auto", k=2))
