"""Thresholds found in a fixed number of steps, as on devices other than the CPU, on difficult lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recsys_topk import operators
from recsys_topk.operators import neuralsort
from recsys_topk.ops.dispatch import backend
from recsys_topk.ops.selection import clip, laplace, logistic

EPS = torch.finfo(torch.float32).eps
MODULES = (clip, laplace, logistic, neuralsort)


def hard_lists() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scores and one k per list: many sizes, scales and offsets, ties, steep and flat ends, extreme k."""
    draw = torch.Generator().manual_seed(0)
    for n in (2, 3, 17, 200, 3000):
        ks = torch.tensor([1, 2, n // 2, n - 2, n - 1, 1, n - 1, n // 3]).clamp(1, n - 1)
        x = torch.randn(8, n, generator=draw)
        for scale in (1e-30, 1e-3, 1.0, 30.0, 1e4, 1e30):
            yield x * scale, ks
        yield torch.zeros(8, n), ks
        yield x.round(), ks
        yield (x.abs() + 0.01).log() * 20, ks
        yield torch.rand(8, n, generator=draw).pow(0.05) * 50, ks
        yield torch.where(torch.arange(n) < ks[:, None], 100.0, 0.0) + x, ks  # a gap at k
        yield torch.where(torch.arange(n) < 1, 1e6, x), ks
        yield 1e6 + x, ks


@pytest.mark.parametrize("tau", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("name", ["lapsum", "sigmoid", "sparse"])
def test_fixed_number_of_steps_gives_exact_thresholds(name: str, tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = operators.get(name, tau=tau)
    lists = list(hard_lists())
    with backend("torch"):
        expected = [operator(x.double(), k) for x, k in lists]
        for module in MODULES:
            monkeypatch.setattr(module, "may_read", lambda _: False)
        for (x, k), exact in zip(lists, expected, strict=True):
            found, wide = operator(x, k), operator(x.double(), k)
            n = x.shape[1]
            assert ((found.p.double().sum(1) - k).abs() <= 8 * n * EPS).all()
            assert ((wide.p.sum(1) - k).abs() <= 8 * n * torch.finfo(torch.float64).eps).all()
            torch.testing.assert_close(wide.p, exact.p, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [2, 17, 3000])
def test_fixed_number_of_steps_suffices_for_fractional_k(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "may_read", lambda _: False)
    x = torch.randn(7, n, generator=torch.Generator().manual_seed(0)) * 10
    k = torch.tensor([1e-30, 0.5, 1.0, n / 2, n - 1e-6, n - 0.5, n - 1 + 1e-6]).clamp_max(n - 2**-12)
    p = operators.get("lapsum")(x, k).p.double()
    assert ((p.sum(1) - k).abs() <= 8 * n * EPS).all()


@pytest.mark.parametrize("normalised", [True, False])
def test_neuralsort_gives_the_same_result_from_all_rows(normalised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    mask = torch.arange(20) < torch.tensor([[20], [12], [5]])
    operator, k = operators.get("neuralsort", normalised=normalised), torch.tensor([3, 7, 4])
    results = []
    for read in (True, False):
        monkeypatch.setattr(neuralsort, "may_read", lambda _, read=read: read)
        p = operator(x, k, mask).p
        results.append((p, *torch.autograd.grad((p * p).sum(), x)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
