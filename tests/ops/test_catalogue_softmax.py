"""The softmax over a whole catalogue equals torch's cross-entropy, whatever the number of logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import recsys_topk.ops.losses.catalogue_softmax as module
from recsys_topk.ops.losses.catalogue_softmax import catalogue_softmax


@pytest.mark.parametrize("at_once", [1, 30, 1 << 20])
def test_value_and_gradient_equal_those_of_cross_entropy(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(0)
    requests, items = (torch.randn(n, 5, generator=draw, dtype=torch.float64).requires_grad_() for n in (7, 11))
    target = torch.randint(11, (7,), generator=draw)
    weights, shift = (torch.rand(n, generator=draw, dtype=torch.float64) for n in (7, 11))
    found = 2 * catalogue_softmax(requests, items, target, weights, tau=0.7, shift=shift)
    logits = requests @ items.T / 0.7
    own = F.one_hot(target, 11).bool()
    losses = F.cross_entropy(torch.where(own, logits, logits - shift), target, reduction="none")
    expected = 2 * (weights * losses).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, (requests, items)), torch.autograd.grad(expected, (requests, items))
    )


def test_large_scores_and_no_lists_are_finite() -> None:
    items = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    loss = catalogue_softmax(torch.tensor([[1.0]]), items, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 2e4
    assert items.grad is not None
    assert items.grad.tolist() == [[1.0], [-1.0]]
    assert catalogue_softmax(torch.zeros(0, 1), items, torch.zeros(0, dtype=torch.int64)).item() == 0.0
