"""Regression tests of operators: one k per list, two items, scores far from 0."""

import pytest
import torch

from recsys_topk import operators


def test_neuralsort_with_one_k_per_list_equals_each_list_alone():
    x = 5.0 * torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]] * 2)
    for normalised in (True, False):
        operator = operators.get("neuralsort", normalised=normalised)
        scores = x.clone().requires_grad_()
        together = operator(scores, torch.tensor([1, 5])).p
        (gradient,) = torch.autograd.grad((together * together).sum(), scores)
        for row, k in enumerate((1, 5)):
            alone = x[row : row + 1].clone().requires_grad_()
            p = operator(alone, k).p
            torch.testing.assert_close(together[row], p[0])
            torch.testing.assert_close(gradient[row], torch.autograd.grad((p * p).sum(), alone)[0][0])


def test_neuralsort_is_finite_at_scores_of_ten_million():
    x = (1e7 * torch.randn(64, 20, generator=torch.Generator().manual_seed(0))).requires_grad_()
    selection = operators.get("neuralsort", tau=0.1)(x, 5)
    (gradient,) = torch.autograd.grad((selection.p * torch.arange(20.0)).sum(), x)
    assert torch.isfinite(selection.log_p).all()
    assert torch.isfinite(selection.log_q).all()
    assert torch.isfinite(gradient).all()
    # Scores this far apart are selected as by a sort.
    assert torch.equal(selection.p > 0.5, operators.get("hard")(x.detach(), 5).p > 0.5)


@pytest.mark.parametrize("network", ["odd_even", "bitonic"])
def test_diffsort_works_with_two_items_and_a_mask(network):
    operator = operators.get("diffsort", network=network, distribution="logistic")
    x = torch.tensor([[0.7, -0.2], [0.3, 9.0]])
    p = operator(x, 1, torch.tensor([[True, True], [True, False]])).p
    first = torch.sigmoid(torch.tensor(0.9))
    torch.testing.assert_close(p, torch.stack((torch.stack((first, 1 - first)), torch.tensor([1.0, 0.0]))))


SUMS = [name for name, cls in operators.registry.classes().items() if cls.sums_to_k]


@pytest.mark.parametrize("tau", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("offset", [0.0, 1e6, -1e7])
@pytest.mark.parametrize("name", SUMS)
def test_memberships_sum_to_k_far_from_zero(name, offset, tau):
    spread = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)).mul(5.0)
    for x in (offset + spread, offset + spread.round(), torch.full((1, 30), offset)):
        p = operators.get(name, tau=tau)(x, 7).p
        # The bound of docs/operators.md: 8 N rounding errors of float32.
        assert (p.double().sum(1) - 7.0).abs().max() <= 8 * 30 * 2.0**-23


@pytest.mark.parametrize("tau", [0.7, 500.0])
@pytest.mark.parametrize("name", ["lapsum", "sigmoid", "sparse", "sinkhorn"])
def test_memberships_of_tied_float64_scores_sum_to_k(name, tau):
    """With only three different scores, the rounding errors of equal terms all have the same sign."""
    few = torch.tensor([-1.0] * 79 + [0.0] * 99 + [1.0] * 71, dtype=torch.float64)[None]
    for x, k in ((few, 126), ((torch.arange(5000) % 3).double()[None], 2501)):
        p = operators.get(name, tau=tau)(x, k).p
        assert (p.sum(1) - k).abs().max() <= 8 * x.shape[1] * 2.0**-52


@pytest.mark.parametrize("name", ["lapsum", "sigmoid", "sparse", "sinkhorn", "softsort", "neuralsort", "diffsort"])
def test_float32_far_from_zero_agrees_with_float64(name):
    x = -1e6 + torch.randn(64, 30, generator=torch.Generator().manual_seed(0)).mul(5.0)
    operator = operators.get(name, tau=2.9)
    results = []
    for scores in (x.clone().requires_grad_(), x.double().requires_grad_()):
        p = operator(scores, 7).p
        results.append((p.double(), torch.autograd.grad((p * p).sum(), scores)[0].double()))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=0.0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=2e-5, rtol=0.0)


def test_sinkhorn_is_finite_where_squares_overflow():
    x = 1e30 * torch.tensor([[1.0, -0.7, 0.2, -1.0], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(operators.get("sinkhorn")(x, 3).p, torch.full((2, 4), 0.75), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["dftopk", "sigmoid", "lapsum", "sparse"])
def test_a_k_that_is_the_rounded_sum_of_the_weights_selects_all(name):
    """Ten weights of 0.1 have the sum 1.0000001 in float32."""
    x = torch.arange(10.0)[None].requires_grad_()
    p = operators.get(name)(x, torch.tensor([1]), item_weights=torch.full((1, 10), 0.1)).p
    p.sum().backward()
    assert torch.equal(p, torch.ones(1, 10))
    assert torch.equal(x.grad, torch.zeros(1, 10))
