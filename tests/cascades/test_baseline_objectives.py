"""The published baselines against loops written from their definitions, with masks, groups and any number of stages."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import registry
from recsys_topk.cascades.objectives.bce import BCEObjective
from recsys_topk.cascades.objectives.fs_lambdaloss import FullStageLambdaLoss
from recsys_topk.cascades.objectives.fs_ranknet import FullStageRankNet
from recsys_topk.cascades.objectives.icc import ICCObjective
from recsys_topk.cascades.objectives.rankflow import RankFlowObjective
from recsys_topk.losses import DFTopKLoss, SigmoidTopKLoss

LOSS = DFTopKLoss(positive_above=7.0)
VECTORS = Path(__file__).parents[1] / "vectors"


def lists_with_groups(stages: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return lists of four groups of three items and two sampled negatives, with padding and the labels of RecFlow."""
    generator = torch.Generator().manual_seed(seed)
    group = [*torch.arange(4).repeat_interleave(3).tolist(), 4, 4]
    groups = torch.tensor(group).expand(5, 14).clone()
    base = torch.tensor([29.0, 28, 27, 7, 7, 7, 6, 6, 6, 5, 5, 5, 0, 0]).expand(5, 14)
    mask = torch.rand(5, 14, generator=generator) < 0.85
    mask[:, [0, 3, 9]] = True
    scores = [torch.randn(5, 14, generator=generator, dtype=torch.double) for _ in range(stages)]
    labels = torch.where(mask, base, 0.0).double()
    return [x.requires_grad_() for x in scores], labels, mask, torch.where(mask, groups, -1)


def softplus(z: float) -> float:
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def valid_items(mask: Tensor, b: int) -> list[int]:
    return [i for i in range(mask.shape[1]) if mask[b, i]]


def bce(x: list[float], positive: list[bool]) -> float:
    return sum(softplus(v) - v * p for v, p in zip(x, positive, strict=True)) / len(x)


@pytest.mark.parametrize(("stages", "visible"), [(2, [5, 2]), (3, [5, 3, 2])])
def test_bce_trains_each_stage_on_the_items_that_reach_it(stages: int, visible: list[int]) -> None:
    scores, labels, mask, groups = lists_with_groups(stages)
    output = BCEObjective(LOSS, stages)(scores, labels, mask, groups=groups, quotas=[6] * stages, k=3)
    for m, x in enumerate(scores):
        values = []
        for b in range(5):
            seen = [i for i in valid_items(mask, b) if groups[b, i] < visible[m]]
            values.append(bce([x[b, i].item() for i in seen], [bool(labels[b, i] > 7) for i in seen]))
        assert output.terms[f"stage{m}"].item() == pytest.approx(sum(values) / 5, abs=1e-12)


def test_fs_ranknet_equals_loop() -> None:
    scores, labels, mask, groups = lists_with_groups(2, seed=1)
    output = FullStageRankNet(LOSS, 2)(scores, labels, mask, groups=groups, quotas=[6, 4], k=3)
    expected = 0.0
    for x in scores:
        for b in range(5):
            items = valid_items(mask, b)
            for g in range(4):
                pairs = [(i, j) for i, j in product(items, items) if groups[b, i] == g and groups[b, j] > g]
                expected += sum(softplus(-(x[b, i] - x[b, j]).item()) for i, j in pairs) / max(len(pairs), 1) / 5
    assert output.total.item() == pytest.approx(expected, abs=1e-10)


def lambda_loop(x: Tensor, labels: Tensor, mask: Tensor, topn: int, fraction: float) -> float:
    total = 0.0
    for b in range(x.shape[0]):
        items = valid_items(mask, b)
        order = sorted(items, key=lambda i: -x[b, i].item())
        rank = {i: r + 1 for r, i in enumerate(order)}
        ideal = sum(
            label / math.log(2 + r)
            for r, label in enumerate(sorted((labels[b, i].item() for i in items), reverse=True))
        )
        cut = {i: 1 / math.log(1 + rank[i]) if rank[i] <= topn else 0.0 for i in items}
        for i, j in product(items, items):
            if i == j:
                continue
            far = abs(rank[i] - rank[j])
            near = abs(1 / math.log(1 + far) - 1 / math.log(2 + far)) if min(rank[i], rank[j]) <= topn else 0.0
            weight = abs(labels[b, i] - labels[b, j]).item() / ideal
            weight *= (1 - fraction) * near + fraction * abs(cut[i] - cut[j])
            z = (x[b, i] - x[b, j]).item()
            total += weight * (softplus(z) - z * bool(labels[b, i] > labels[b, j]))
    return total / x.shape[0]


@pytest.mark.parametrize("fraction", [0.8, 1.0, 0.0])
def test_fs_lambdaloss_equals_loop(fraction: float) -> None:
    scores, labels, mask, groups = lists_with_groups(2, seed=2)
    objective = FullStageLambdaLoss(LOSS, 2, topn=5, smooth_fraction=fraction)
    output = objective(scores, labels, mask, groups=groups, quotas=[6, 4], k=3)
    expected = sum(lambda_loop(x, labels, mask, 5, fraction) for x in scores)
    assert output.total.item() == pytest.approx(expected, abs=1e-9)


def test_fs_lambdaloss_matches_the_published_code() -> None:
    stored = json.loads((VECTORS / "loss_fs_lambda_kwai.json").read_text())
    for case in stored["cases"]:
        x = torch.tensor(case["scores"], dtype=torch.double, requires_grad=True)
        labels = torch.tensor(case["labels"], dtype=torch.double)
        objective = FullStageLambdaLoss(DFTopKLoss(), 1, topn=case["k"], smooth_fraction=1.0)
        total = objective([x], labels, quotas=[case["k"]], k=case["k"]).total
        total.backward()
        tolerance = stored["suggested_tolerance"]
        assert total.item() == pytest.approx(case["output"], rel=tolerance, abs=tolerance), case["name"]
        torch.testing.assert_close(x.grad, torch.tensor(case["grad"], dtype=torch.double), rtol=1e-8, atol=tolerance)


@pytest.mark.parametrize(("stages", "quotas", "factor"), [(2, [6, 4], 1.0), (3, [7, 6, 4], 2.0)])
def test_icc_equals_loop(stages: int, quotas: list[int], factor: float) -> None:
    scores, labels, mask, groups = lists_with_groups(stages, seed=3)
    output = ICCObjective(LOSS, stages, sigma=0.1)(scores, labels, mask, groups=groups, quotas=quotas, k=3)
    values = []
    for b in range(5):
        items = valid_items(mask, b)
        combined = dict.fromkeys(items, 0.0)
        passed = dict.fromkeys(items, 1.0)
        for m, (x, cut) in enumerate(zip(scores, quotas, strict=True)):
            kappa = sorted((x[b, i].item() for i in items), reverse=True)[cut - 1]
            for i in items:
                inside = 1 / (1 + math.exp(-(x[b, i].item() - kappa) / 0.1)) if len(items) > cut else 1.0
                share = inside if m == stages - 1 else 1 - inside
                combined[i] += factor**m * passed[i] * share * x[b, i].item()
                passed[i] *= inside
        pairs = [(i, j) for i, j in product(items, items) if labels[b, i] > labels[b, j]]
        values.append(sum(softplus(-(combined[i] - combined[j])) for i, j in pairs) / len(pairs))
    assert output.total.item() == pytest.approx(sum(values) / 5, abs=1e-9)


@pytest.mark.parametrize(("stages", "quotas", "ranking"), [(2, [6, 4], 0.0), (3, [7, 5, 3], 1.0)])
def test_rankflow_equals_loop(stages: int, quotas: list[int], ranking: float) -> None:
    scores, labels, mask, groups = lists_with_groups(stages, seed=5)
    output = RankFlowObjective(LOSS, stages)(scores, labels, mask, groups=groups, quotas=quotas, k=3)
    classify: list[list[float]] = [[] for _ in scores]
    distil = contrast = 0.0
    for b in range(5):
        reached = valid_items(mask, b)
        for m, x in enumerate(scores):
            positive = [bool(labels[b, i] > 7) for i in reached]
            if any(positive):
                classify[m].append(bce([x[b, i].item() for i in reached], positive))
            if m + 1 == stages:
                continue
            following = scores[m + 1]
            reached = sorted(reached, key=lambda i, x=x: -x[b, i].item())[: quotas[m]]
            distil += sum((x[b, i] - following[b, i]).item() ** 2 for i in reached) / len(reached) / 5
            ordered = sorted(reached, key=lambda i, x=following: -x[b, i].item())
            best, rest = ordered[: quotas[m + 1]], ordered[quotas[m + 1] :]
            margin = sum(x[b, i].item() for i in best) / len(best) - sum(x[b, i].item() for i in rest) / len(rest)
            contrast += ranking * softplus(-margin) / 5
    expected = sum(sum(values) / len(values) for values in classify) + distil + contrast
    assert output.total.item() == pytest.approx(expected, abs=1e-9)


def test_rankflow_distillation_has_no_gradient_for_the_teacher() -> None:
    scores, labels, mask, groups = lists_with_groups(2, seed=6)
    output = RankFlowObjective(LOSS, 2)(scores, labels, mask, groups=groups, quotas=[6, 4], k=3)
    (gradient,) = torch.autograd.grad(output.terms["distillation0"], [scores[1]], allow_unused=True)
    assert gradient is None


@pytest.mark.parametrize("name", ["fs_ranknet", "bce"])
def test_missing_groups_raise(name: str) -> None:
    scores, labels, mask, _ = lists_with_groups(2)
    with pytest.raises(ValueError, match="needs sample groups"):
        registry.resolve(name)(LOSS, 2)(scores, labels, mask, quotas=[6, 4], k=3)


@pytest.mark.parametrize("name", sorted(registry.available()))
def test_padding_has_no_effect_in_every_objective(name: str) -> None:
    scores, labels, mask, groups = lists_with_groups(3, seed=7)
    cls = registry.resolve(name)
    objective = cls(SigmoidTopKLoss(positive_above=7.0) if cls.needs_sum else LOSS, 3).double()
    quotas = [7, 6, 4]
    first = objective(scores, labels, mask, groups=groups, quotas=quotas, k=3)
    gradients = torch.autograd.grad(first.total, scores)
    nan_padded = [torch.where(mask, x.detach(), float("nan")).requires_grad_() for x in scores]
    junk_labels = torch.where(mask, labels, 99.0)
    second = objective(nan_padded, junk_labels, mask, groups=groups, quotas=quotas, k=3)
    torch.testing.assert_close(first.total, second.total)
    for one, two in zip(gradients, torch.autograd.grad(second.total, nan_padded), strict=True):
        torch.testing.assert_close(one, two)
        assert bool((two[~mask] == 0).all())
