"""The Fenchel-Young loss of Sparse Top-K against its definition, and where it differs from the cross-entropy."""

from __future__ import annotations

import pytest
import torch

from recsys_topk.losses import get
from recsys_topk.operators import get as get_operator


@pytest.mark.parametrize("tau", [0.3, 1.0, 20.0])
def test_value_and_gradient_match_the_fenchel_young_definition(tau: float) -> None:
    """L = max_p (<x, p> - tau |p|^2 / 2) - (<x, y> - tau |y|^2 / 2), the maximum at the operator's membership."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 12, dtype=torch.double, generator=generator, requires_grad=True)
    y = torch.zeros(6, 12, dtype=torch.double)
    y[:, torch.randperm(12, generator=generator)[:4]] = 1.0
    p = get_operator("sparse", tau=tau)(x.detach(), 4).p
    expected = (x * p).sum(1) - tau / 2 * p.square().sum(1) - (x * y).sum(1) + tau / 2 * y.square().sum(1)
    losses = get("sparse_fy", tau=tau, k=4, reduction="none")(x, y)
    torch.testing.assert_close(losses, expected / 12)
    losses.sum().backward()
    torch.testing.assert_close(x.grad, (p - y) / 12)


def test_badly_misplaced_item_has_a_gradient() -> None:
    x, y = torch.tensor([[9.0, 8.0, 0.0, -9.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    gradients = {}
    for name in ("sparse", "sparse_fy"):
        leaf = x.clone().requires_grad_()
        get(name, k=2)(leaf, y).backward()
        gradients[name] = leaf.grad
    assert gradients["sparse"].abs().sum() == 0.0
    assert gradients["sparse_fy"].tolist() == [[0.0, 0.25, 0.0, -0.25]]


def test_loss_is_zero_if_true_items_exceed_the_others_by_tau() -> None:
    loss = get("sparse_fy", tau=2.0, k=2)
    labels = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    assert loss(torch.tensor([[5.0, 3.0, 1.0, 6.0]]), labels) == 0.0
    assert loss(torch.tensor([[4.0, 3.0, 1.0, 6.0]]), labels) > 0.0


def test_k_is_cut_to_the_positives_and_all_positive_lists_have_no_loss() -> None:
    loss = get("sparse_fy", k=3, reduction="none")
    x = torch.tensor([[1.0, 0.0, -1.0, 0.5, 0.2], [1.0, 0.0, -1.0, 0.5, 0.2]])
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = get("sparse_fy", k=1, reduction="none")(x[:1], one[:1])
    assert loss(x, one).tolist() == [expected.item(), 0.0]
