"""Weights of items: weight 2 equals two copies, weight 0 a masked item, in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recsys_topk.ops.losses.joint_terms import JointTask, joint_losses
from recsys_topk.ops.losses.topk_loss import topk_loss
from recsys_topk.ops.selection.membership import Law, membership_logs

LAWS = [Law("dftopk", 0.7, 0.3), Law("logistic", 0.7), Law("laplace", 0.7), Law("clip", 2.0)]
LOSSES = [*LAWS, Law("fenchel_young", 2.0)]


def named(law: Law) -> str:
    return law.name


def lists(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores with ties, labels and weights of 0 to 3, (6, 9); the first item of a list has weight 1."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 9, generator=generator, dtype=dtype)
    scores[1] = scores[1].round()
    scores[2] = scores[2].round()
    weights = torch.randint(0, 4, (6, 9), generator=generator).to(dtype)
    weights[:, 0] = 1.0
    labels = torch.randint(0, 4, (6, 9), generator=generator).to(dtype)
    labels[:, 0] = 2.0
    return scores, labels, weights


def copies(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the item of each copy, (B, M), and which of them exist."""
    width = int(weights.sum(1).max())
    items = torch.zeros(len(weights), width, dtype=torch.int64)
    exist = torch.zeros_like(items, dtype=torch.bool)
    for row, counts in enumerate(weights.long()):
        found = torch.repeat_interleave(torch.arange(len(counts)), counts)
        items[row, : len(found)], exist[row, : len(found)] = found, True
    return items, exist


@pytest.mark.parametrize("law", LAWS, ids=named)
@pytest.mark.parametrize("k", [1, 3, torch.tensor([1, 2, 3, 4, 5, 6])], ids=["1", "3", "each"])
def test_membership_equals_that_of_copies(law: Law, k: int | Tensor) -> None:
    scores, _, weights = lists()
    items, exist = copies(weights)
    mask = torch.ones_like(weights, dtype=torch.bool)
    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found = membership_logs(x, k, mask, law, item_weights=weights)
    spread = torch.where(exist, y.gather(1, items), 0.0)
    expected = membership_logs(spread, k, exist, law)
    cotangent = torch.sin(torch.arange(scores.numel(), dtype=scores.dtype)).view_as(scores)
    for one, other in zip(found, expected, strict=True):
        p, q = one.exp(), other.exp()
        torch.testing.assert_close(p.gather(1, items)[exist], q[exist], rtol=1e-9, atol=1e-12)
        (first,) = torch.autograd.grad((p * cotangent * weights)[weights > 0].sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad((q * cotangent.gather(1, items))[exist].sum(), y, retain_graph=True)
        torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-10)
    if law.name != "dftopk":
        total = (found[0].exp() * weights).sum(1)
        torch.testing.assert_close(total, torch.as_tensor(k, dtype=total.dtype).expand(6), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("law", LOSSES, ids=named)
@pytest.mark.parametrize("k", [2, None, torch.tensor([0, 1, 2, 3, 40, 5])], ids=["2", "positives", "each"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "reference"])
def test_loss_equals_that_of_copies(law: Law, k: int | Tensor | None, masked: bool, dtype: torch.dtype) -> None:
    scores, labels, weights = lists(dtype)
    near = {"rtol": 1e-8, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    mask = torch.rand(weights.shape, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    items, exist = copies(weights if mask is None else weights * mask)
    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found, counted = topk_loss(x, labels, mask, k, 1.0, law, False, weights)
    expected, also = topk_loss(y.gather(1, items), labels.gather(1, items), exist, k, 1.0, law, False)
    torch.testing.assert_close(found, expected, **near)
    assert (counted is None) == (also is None)
    if counted is not None:
        assert counted.tolist() == also.tolist()
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **near)


@pytest.mark.parametrize("law", LAWS, ids=named)
@pytest.mark.parametrize("quotas", [None, (6, 3), (20, 2)])
def test_joint_objective_equals_that_of_copies(law: Law, quotas: tuple[int, ...] | None) -> None:
    scores, labels, weights = lists()
    items, exist = copies(weights)
    found = [x.clone().requires_grad_() for x in (scores, scores.flip(0))]
    copied = [x.clone().requires_grad_() for x in (scores, scores.flip(0))]
    losses, counted = joint_losses(found, JointTask(labels, None, 2, quotas, 1.0, law, weights))
    task = JointTask(labels.gather(1, items), exist, 2, quotas, 1.0, law)
    expected, also = joint_losses([x.gather(1, items) for x in copied], task)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    assert counted.tolist() == also.tolist()
    losses.sum().backward()
    expected.sum().backward()
    for one, other in zip(found, copied, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("law", LAWS, ids=named)
def test_fractional_weights_scale_with_k_and_have_exact_gradients(law: Law) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 8, generator=generator, dtype=torch.float64) + 0.05
    mask, k = torch.ones_like(weights, dtype=torch.bool), torch.tensor([0.7, 1.0, 2.5], dtype=torch.float64)
    once = membership_logs(x, k, mask, law, item_weights=weights)
    thrice = membership_logs(x, 3.0 * k, mask, law, item_weights=3.0 * weights)
    for one, other in zip(once, thrice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if law.name != "dftopk":
        torch.testing.assert_close((once[0].exp() * weights).sum(1), k, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(lambda x: membership_logs(x, k, mask, law, item_weights=weights)[0].exp(), (x,))
    if law.name != "clip":
        assert torch.autograd.gradgradcheck(
            lambda x: membership_logs(x, k, mask, law, item_weights=weights)[0].exp(), (x,)
        )


@pytest.mark.parametrize("law", LAWS, ids=named)
def test_weights_of_one_change_nothing(law: Law) -> None:
    scores, labels, _ = lists(torch.float32)
    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found, _ = topk_loss(x, labels, None, 3, 1.0, law, True, torch.ones_like(scores))
    expected, _ = topk_loss(y, labels, None, 3, 1.0, law, True)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    found.backward()
    expected.backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=2e-4, atol=2e-6)


def test_threshold_at_the_bound_of_its_bracket_is_exact() -> None:
    """All scores tie, so that sigmoid(-b / tau) = 3 / 5, the bound of the search."""
    x = torch.full((1, 4), -65504.0, requires_grad=True)
    labels, weights = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    value, _ = topk_loss(x, labels, None, 3, 0.0, Law("logistic", 1e-3), True, weights)
    expected = -(3.0 * math.log(0.6) + 2.0 * math.log(0.4)) / 5.0
    assert value.item() == pytest.approx(expected, rel=1e-5)
