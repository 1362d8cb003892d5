"""ARF and ARF-v2 against the published code's values, a loop, and finite differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys_topk.losses import arf, get
from recsys_topk.ops.dispatch import backend

VECTORS = Path(__file__).parents[1] / "vectors"


@pytest.mark.parametrize(("name", "file"), [("arf", "loss_arf_kwai"), ("arf_v2", "loss_arfv2_kwai")])
def test_matches_peer(name: str, file: str) -> None:
    # The peer calls k support_m and `top` top_k; its w = 1 is log_variance = 0. With a mask, the peer lets padding
    # compete and divides by N: tests/reference covers that case.
    cases = json.loads((VECTORS / f"{file}.json").read_text())["cases"]
    for case in [case for case in cases if case["mask"] is None]:
        x = torch.tensor(case["scores"], dtype=torch.float64, requires_grad=True)
        y = torch.tensor(case["labels"], dtype=torch.float64)
        value = get(name, k=case["support_m"], top=case["top_k"], positive_above=-1.0)(x, y)
        torch.testing.assert_close(value, torch.tensor(case["output"], dtype=torch.float64), atol=1e-9, rtol=1e-9)
        if case["grad_unique"]:
            value.backward()
            expected = torch.tensor(case["grad"], dtype=torch.float64)
            torch.testing.assert_close(x.grad, expected, atol=1e-9, rtol=1e-9)


def loss_by_loop(x: Tensor, labels: Tensor, k: int, two_sided: bool) -> float:
    """Return the loss of one list, computed entry by entry from the definition."""
    n, eps = len(x), 1e-6
    logits = [[float((n + 1 - 2 * r) * x[i] - (x[i] - x).abs().sum()) for i in range(n)] for r in range(1, n + 1)]
    p = torch.softmax(torch.tensor(logits, dtype=torch.float64), 1)
    relax = order = 0.0
    for i in range(n):
        y = float(labels[i] > 0)
        up, down = float(p[:k, i].sum()), float(p[k:, i].sum())
        if two_sided:
            share = [torch.log(torch.tensor(v / (up + down + eps) + eps, dtype=torch.float64)) for v in (up, down)]
            relax -= float(y * share[0] + (1 - y) * share[1]) / n
        else:
            relax -= y * float(torch.log(torch.tensor(up / k + eps, dtype=torch.float64))) / n
        ahead, tied = int((labels > labels[i]).sum()), int((labels == labels[i]).sum())
        for r in range(ahead, ahead + tied):
            order -= float(torch.log(p[r, i] + eps)) / tied / n**2
    return relax + 0.5 * order


@pytest.mark.parametrize("name", ["arf", "arf_v2"])
def test_value_equals_loop_over_valid_items(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 9, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (4, 9), generator=generator).double()
    mask = torch.rand(4, 9, generator=generator) > 0.25
    each = get(name, k=3, reduction="none")(torch.where(mask, x, float("nan")), labels, mask)
    expected = [loss_by_loop(x[b][mask[b]], labels[b][mask[b]], 3, name == "arf_v2") for b in range(4)]
    torch.testing.assert_close(each.detach(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["arf", "arf_v2"])
def test_gradient_grouping_and_learned_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.tensor([[2.0, 1.0, 1.0, 0.0, 0.0, 3.0, 0.0]] * 5, dtype=torch.float64)
    loss = get(name, k=3)
    if name == "arf":
        assert torch.autograd.gradcheck(lambda x: loss(x, labels), (x,))

    def run() -> tuple[Any, ...]:
        value = loss(x, labels)
        return value, *torch.autograd.grad(value, (x, loss.log_variance))

    whole = run()
    monkeypatch.setattr(arf, "GROUP_ON_CPU", 2 * 49)
    for grouped, direct in zip(run(), whole, strict=True):
        torch.testing.assert_close(grouped, direct)
    assert "log_variance" in loss.state_dict()
    with pytest.raises(ValueError, match="top"):
        get(name, top=0)


def test_groups_fit_the_cache_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 2**24 entries take three times as long on a CPU, and three times the memory."""
    sizes = []
    terms = arf.ARFLoss._terms
    monkeypatch.setattr(arf.ARFLoss, "_terms", lambda self, *group: sizes.append(len(group[0])) or terms(self, *group))
    with backend("torch"):
        get("arf", k=2)(torch.randn(12, 300), torch.ones(12, 300))
    assert sizes == [5, 5, 2]
