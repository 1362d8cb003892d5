"""The compiled top-k losses against loops over items in float64, and their use with autograd."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from recsys_topk import losses
from recsys_topk.ops.dispatch import backend, installed
from recsys_topk.ops.losses.topk_loss import topk_loss
from recsys_topk.ops.selection.membership import Law

pytestmark = pytest.mark.skipif(not installed("numba"), reason="the compiled loops need numba")

LAWS = [Law("dftopk", 0.7), Law("dftopk", 2.0, 0.2), Law("logistic", 0.7), Law("laplace", 0.7)]
LAWS += [Law("clip", 1.3), Law("fenchel_young", 1.3)]
NAMES = ["dftopk", "sigmoid", "lapsum", "sparse", "sparse_fy"]


def solve(total, k, low, high):
    """Return the b at which the decreasing function `total` is k, by bisection."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if total(middle) > k else (low, middle)
    return 0.5 * (low + high)


def brute_force(x: list[float], y: list[float], k: int, above: float, law: Law) -> tuple[float, list[float]] | None:
    """Return loss and gradient of one list without masked items, or None if the list is skipped."""
    n = len(x)
    positive = [label > above for label in y]
    k = min(k, n)
    if not any(positive) or not 0 < k < n:
        return None
    reach = sorted((label for label, chosen in zip(y, positive, strict=True) if chosen), reverse=True)[:k][-1]
    true = [chosen and label >= reach for label, chosen in zip(y, positive, strict=True)]
    tau = law.tau
    if law.name == "fenchel_young":
        k = sum(true)
        if k == n:
            return 0.0, [0.0] * n
    down = sorted(x, reverse=True)
    kept, cut = down[k - 1], down[k]

    def membership(z):
        if law.name in ("dftopk", "logistic"):
            return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))
        if law.name == "laplace":
            return 1 - 0.5 * math.exp(-z) if z > 0 else 0.5 * math.exp(z)
        return min(max(z, 0.0), 1.0)

    def density(z):
        if law.name == "laplace":
            return 0.5 * math.exp(-abs(z))
        return float(0 < z < 1) if law.name in ("clip", "fenchel_young") else membership(z) * membership(-z)

    if law.name == "dftopk":
        b = cut + law.alpha * (kept - cut)
        moves = [law.alpha * (v == kept) / x.count(kept) + (1 - law.alpha) * (v == cut) / x.count(cut) for v in x]
    else:
        wide = (max(x) - min(x)) + 100 * tau
        b = solve(lambda b: sum(membership((v - b) / tau) for v in x), k, min(x) - wide, max(x) + wide)
        weights = [density((v - b) / tau) for v in x]
        moves = [w / max(sum(weights), 1e-300) for w in weights]
    z = [(v - b) / tau for v in x]
    p = [membership(u) for u in z]
    if law.name == "fenchel_young":
        wrong = [1 - u if t else u for u, t in zip(z, true, strict=True)]
        value = tau * sum(w - 0.5 if w > 1 else 0.5 * max(w, 0.0) ** 2 for w in wrong) / n
        return value, [(u - t) / n for u, t in zip(p, true, strict=True)]
    chosen = [q if t else 1 - q if law.name == "clip" else membership(-u) for u, q, t in zip(z, p, true, strict=True)]
    if law.name == "clip":
        inner = [
            (-1 if t else 1) * density(u) / c if 1e-6 <= c <= 1 - 1e-6 else 0.0
            for u, c, t in zip(z, chosen, true, strict=True)
        ]
        chosen = [min(max(c, 1e-6), 1 - 1e-6) for c in chosen]
    else:
        inner = [(-1 if t else 1) * density(u) / c for u, c, t in zip(z, chosen, true, strict=True)]
    value = -sum(math.log(c) for c in chosen) / n
    return value, [(g - m * sum(inner)) / (tau * n) for g, m in zip(inner, moves, strict=True)]


def check(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    k: int | Tensor | None,
    above: float,
    law: Law,
    name: str = "numba",
    device: str = "cpu",
) -> None:
    x = scores.clone().requires_grad_()
    there = [one.to(device) if isinstance(one, Tensor) else one for one in (x, labels, mask, k)]
    with backend(name):
        assert topk_loss.backend_for(*there, above, law, False) == name
        values, counted = topk_loss(*there, above, law, False)
        values.sum().backward()
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        row, grades = scores[b][real].tolist(), labels[b][real].tolist()
        wanted = sum(grade > above for grade in grades) if k is None else int(k[b]) if isinstance(k, Tensor) else k
        found = brute_force(row, grades, wanted, above, law)
        assert (counted is None or bool(counted[b])) == (found is not None)
        value, gradient = (0.0, [0.0] * len(row)) if found is None else found
        assert values[b].item() == pytest.approx(value, rel=3e-6, abs=3e-7)
        # A clipped membership p near 0 is a difference of scores, and its gradient is 1 / p.
        bound = (1e-4 if law.name == "clip" else 2e-6) * max(1.0, max((abs(g) for g in gradient), default=0.0))
        torch.testing.assert_close(x.grad[b][real].double(), torch.tensor(gradient).double(), rtol=0, atol=bound)
        assert not x.grad[b][~real].any()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.name}-{law.alpha}")
def test_values_and_gradients_equal_loops_over_items(law):
    generator = torch.Generator().manual_seed(0)
    for lists, n in ((40, 7), (20, 33), (3, 130)):
        x = torch.randn(lists, n, generator=generator)
        # Many ties, at multiples of 1/2.
        x[::2] = (x[::2] * 2).round() / 2
        x[1] = 0.25
        labels = torch.randint(0, 4, (lists, n), generator=generator).float()
        mask = torch.rand(lists, n, generator=generator) > 0.3
        ks = torch.randint(0, n + 2, (lists,), generator=generator)
        check(x, labels, None, max(1, n // 5), 0.0, law)
        check(x, labels, None, None, 2.0, law)
        check(x.masked_fill(~mask, math.nan), labels.masked_fill(~mask, 9.0), mask, ks, 1.0, law)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", [0.0, 1e6, -3e7])
def test_scores_far_from_0_keep_precision(name, offset):
    x = torch.arange(12.0).flip(0)[None] * 4 + offset
    labels = torch.zeros(1, 12)
    labels[0, [1, 2, 5]] = 1.0
    loss = losses.get(name, k=3, tau=8.0)
    near, far = (x - offset).requires_grad_(), x.clone().requires_grad_()
    with backend("numba"):
        a, b = loss(near, labels), loss(far, labels)
        a.backward()
        b.backward()
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    torch.testing.assert_close(near.grad, far.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tau", [1e-4, 1e-2, 1e4])
def test_extreme_temperatures_match_the_reference(name, tau):
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(20, 50, generator=generator).double(), torch.zeros(20, 50)
    labels[:, :5] = 1.0
    loss = losses.get(name, k=8, tau=tau, reduction="none")
    exact, ours = x.float().double().requires_grad_(), x.float().requires_grad_()
    with backend("torch"):
        expected = loss(exact, labels.double())
        expected.sum().backward()
    with backend("numba"):
        found = loss(ours, labels)
        found.sum().backward()
    size = exact.grad.abs().amax(1, keepdim=True).clamp_min(1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=1e-5)
    assert ((ours.grad.double() - exact.grad).abs() / size).max() < (3e-2 if tau < 1e-3 else 2e-3)


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("gap", [1e3, 1e4])
def test_tied_scores_far_apart_balance_at_the_threshold(name, gap):
    """At large gaps half of the mass of the threshold is above it and half below, whatever the numbers of ties."""
    x = torch.tensor([[gap] * 3 + [0.0] * 5 + [-gap] * 2]).requires_grad_()
    labels = torch.tensor([[0.0, 1.0, 1.0, 1.0] + [0.0] * 6])
    with backend("numba"):
        value = losses.get(name, k=3)(x, labels)
        value.backward()
    away = [gap / 2, gap / 2]  # losses of the wrong item of the first group, and of the true one of the second
    if name != "dftopk":
        shift = 0.5 * math.log(5 / 3)  # where 3 exp(-(gap / 2 - b)) = 5 exp(-(gap / 2 + b))
        away = [gap / 2 - shift, gap / 2 + shift]
    one = math.log(2) if name == "lapsum" else 0.0  # -log F(-t) = t + log 2 for the Laplace law
    assert value.item() == pytest.approx(sum(away) / 10 + one / 5, rel=1e-5)
    # The slopes are 1 and -1: nothing is left for the threshold to move.
    expected = torch.tensor([[0.1, 0.0, 0.0, -0.1] + [0.0] * 6])
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-6)
    x.grad = None
    only = torch.tensor([[1.0, 1.0, 1.0, 1.0] + [0.0] * 6])  # slope -1 of one item, which the threshold shares
    with backend("numba"):
        losses.get(name, k=3)(x, only).backward()
    shares = torch.tensor([[1 / 6] * 3 + [1 / 10] * 5 + [0.0] * 2])
    expected = (shares - torch.eye(10)[3]) / 10
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_scores_that_the_compiled_loop_refuses_use_the_reference(name):
    labels = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    for bad in (math.nan, math.inf, 3e30):
        scores = torch.tensor([[0.5, bad, 0.0, -1.0]])
        loss = losses.get(name, k=2, reduction="none")
        with backend("torch"):
            expected = loss(scores, labels)
        with backend("numba"):
            torch.testing.assert_close(loss(scores, labels), expected, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_retained_graph_gives_the_same_gradient_twice(name, reduction):
    x = torch.randn(6, 30, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = (torch.arange(30) < 4).float().expand(6, 30)
    value = losses.get(name, k=5, reduction=reduction)(x, labels).sum() * 3.0
    (first,) = torch.autograd.grad(value, x, retain_graph=True)
    kept = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(second, kept, rtol=0, atol=0)


def test_result_does_not_depend_on_the_number_of_threads():
    x, labels = torch.randn(37, 1000), (torch.rand(37, 1000) < 0.3).float()  # enough items for several threads
    loss = losses.get("dftopk", k=4, reduction="none")
    one = loss(x, labels)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.testing.assert_close(loss(x, labels), one, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_default_call_uses_the_compiled_loop(name):
    x, labels = torch.randn(3, 9), (torch.arange(9) < 3).float().expand(3, 9)
    law = losses.get(name, k=2).law()
    with backend("auto"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert topk_loss.backend_for(x, labels, None, 2, 0.0, law, True) == "numba"


def test_operator_with_another_membership_does_not_use_the_compiled_loop():
    from recsys_topk.operators.lapsum import LapSum

    class Halved(LapSum):
        def select(self, scores, k, mask):
            return super().select(scores * 0.5, k, mask)

    x, labels = torch.randn(3, 9), (torch.arange(9) < 3).float().expand(3, 9)
    torch.testing.assert_close(losses.TopKLoss(Halved(), k=2)(x, labels), losses.get("lapsum", k=2)(x * 0.5, labels))
