"""Talos, LLPAUC, PSL, BSL, gBCE and the corrected logQ, against loops written from their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from recsys_topk.losses import BCELoss, SoftmaxLoss, get

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 8, generator=GENERATOR, dtype=torch.float64)
Y = (torch.rand(5, 8, generator=GENERATOR) < 0.4).double()
Y[:, 0], Y[:, 1] = 1.0, 0.0
MASK = torch.rand(5, 8, generator=GENERATOR) < 0.8
MASK[:, :2] = True


def split(row: int) -> tuple[list[float], list[float]]:
    """Return the scores of the positives and of the negatives of a list."""
    pairs = [(x, y) for x, y, real in zip(X[row].tolist(), Y[row].tolist(), MASK[row].tolist(), strict=True) if real]
    return [x for x, y in pairs if y], [x for x, y in pairs if not y]


def check(loss: object, expected: list[float]) -> None:
    found = loss(X, Y, MASK)  # type: ignore[operator]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_talos_equals_its_definition():
    expected = []
    for row in range(5):
        positives, negatives = split(row)
        beta = sorted(positives + negatives, reverse=True)[1]
        rivals = sum(sigmoid(x - beta) ** (1 / 0.3) for x in negatives)
        own = [sigmoid(x - beta) ** (1 / 0.3) for x in positives]
        expected.append(sum(-math.log(p / (p + rivals)) for p in own) / len(own))
    check(get("talos", tau=0.3, k=2, reduction="none"), expected)


@pytest.mark.parametrize(("max_tpr", "max_fpr"), [(1.0, 1.0), (0.5, 0.5), (0.7, 0.1)])
def test_llpauc_equals_the_mean_over_pairs_of_copies(max_tpr: float, max_fpr: float):
    """A share of a tenth of n items is n of 10 n copies, so that no item counts in part."""
    expected = []
    for row in range(5):
        positives, negatives = (sorted([sigmoid(x) for x in part] * 10, reverse=True) for part in split(row))
        top = positives[: round(max_tpr * len(positives))], negatives[: round(max_fpr * len(negatives))]
        pairs = [(1 - a + b) ** 2 for a, b in itertools.product(*top)]
        expected.append(sum(pairs) / len(pairs))
    check(get("llpauc", max_tpr=max_tpr, max_fpr=max_fpr, reduction="none"), expected)


ACTIVATIONS = {
    "exp": math.exp,
    "tanh": lambda d: 1 + math.tanh(d),
    "relu": lambda d: max(1 + d, 1e-300),
    "atan": lambda d: max(1 + math.atan(d), 1e-300),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("against", ["all", "negatives"])
def test_pairwise_softmax_equals_its_definition(activation: str, against: str):
    f, expected = ACTIVATIONS[activation], []
    for row in range(5):
        positives, negatives = split(row)
        terms = []
        for x in positives:
            rivals = positives + negatives if against == "all" else [x, *negatives]
            terms.append(math.log(sum(f(other - x) ** (1 / 0.5) for other in rivals)))
        expected.append(sum(terms) / len(terms))
    check(SoftmaxLoss(0.5, against, activation, reduction="none"), expected)


@pytest.mark.parametrize("against", ["all", "negatives"])
def test_bilateral_softmax_equals_its_definition_and_tends_to_the_mean(against: str):
    expected = []
    for row in range(5):
        positives, negatives = split(row)
        rivals = positives + negatives if against == "all" else negatives
        best = math.log(sum(math.exp(x / 0.2) for x in positives) / len(positives))
        expected.append(math.log(sum(math.exp(x / 0.5) for x in rivals)) - 0.2 / 0.5 * best)
    check(SoftmaxLoss(0.5, against, tau_positives=0.2, reduction="none"), expected)
    if against == "all":
        mean, limit = SoftmaxLoss(0.5)(X, Y, MASK), SoftmaxLoss(0.5, tau_positives=1e6)(X, Y, MASK)
        torch.testing.assert_close(limit, mean, rtol=1e-5, atol=1e-5)


def test_calibrated_cross_entropy_is_least_at_the_probability_among_all_negatives():
    """One score for a positive and a third of its 9 negatives: with t = 1 the optimum is 1 / 10, as with all."""
    share = 1 / 3
    labels = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    for t, probability in ((0.0, 1 / 4), (1.0, 1 / 10)):
        logit = torch.tensor(math.log(probability / (1 - probability)), requires_grad=True)
        BCELoss(share, t)(logit.expand(1, 4), labels).backward()
        assert logit.grad.item() == pytest.approx(0.0, abs=1e-6)


def test_logq_correction_has_the_gradient_of_the_corrected_formula():
    x = X[:1].clone().requires_grad_()
    log_q = torch.log(torch.rand(1, 8, generator=GENERATOR, dtype=torch.float64))
    log_q[:, 0] = 0.0
    labels = torch.eye(8, dtype=torch.float64)[:1]
    loss = SoftmaxLoss(tau=0.7)
    loss(loss.correct_sampling(x, log_q), labels).backward()
    again = X[:1].clone().requires_grad_()
    negatives = torch.logsumexp(again[:, 1:] / 0.7 - log_q[:, 1:], 1)
    p = torch.sigmoid(again[:, 0] / 0.7 - negatives).detach()
    ((1 - p) * (negatives - again[:, 0] / 0.7)).sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["talos", "llpauc"])
def test_a_list_without_negatives_has_no_loss(name: str):
    x: Tensor = torch.randn(2, 3, generator=GENERATOR, requires_grad=True)
    value = get(name, k=2)(x, torch.ones(2, 3))
    value.backward()
    assert value.item() == 0.0
    assert not x.grad.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get("llpauc", max_tpr=0.0), "max_tpr must be in"),
        (lambda: BCELoss(sampling_rate=2.0), "sampling_rate must be in"),
        (lambda: BCELoss(calibration=-1.0), "calibration must be from 0 to 1"),
        (lambda: SoftmaxLoss(activation="elu"), "activation must be 'exp', 'tanh', 'relu' or 'atan'"),
        (lambda: SoftmaxLoss(activation="tanh", tau_positives=1.0), "tau_positives requires activation 'exp'"),
    ],
)
def test_bad_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
