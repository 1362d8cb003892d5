"""Rank metrics with a cut-off k: NDCG, DCG, average precision, reciprocal rank, precision."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.checks import check_count, check_lists
from recsys_topk.numerics import full_mask
from recsys_topk.ops.losses.dcg import Gain, check_gain, gains, ideal_dcg, rank_discounts
from recsys_topk.ops.selection.ranks import descending_order


def ndcg_at(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exponential",
    positive_above: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return NDCG@k per list: sum_{r <= k} g(y at rank r) / log2(1 + r), divided by its largest possible value.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).
        k: Cut-off; None = no cut-off.
        gain: ``"exponential"``, g = 2^y - 1, or ``"linear"``, g = y (for labels such as RecFlow's 29..20).
        positive_above: Lists without a label above this are skipped; gains use every label.

    Example:
        >>> ndcg_at(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]), k=2)[0]
        tensor([0.6309], dtype=torch.float64)
    """
    value, counted = dcg_at(scores, labels, mask, k=k, gain=gain, positive_above=positive_above)
    valid = full_mask(scores) if mask is None else mask
    best = ideal_dcg(torch.where(valid, gains(labels.double(), gain), 0.0), k)
    counted = counted & (best > 0)
    return torch.where(counted, value / torch.where(counted, best, 1.0), 0.0), counted


def dcg_at(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exponential",
    positive_above: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return DCG@k per list: sum_{r <= k} g(y at rank r) / log2(1 + r).

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).
        k: Cut-off; None = no cut-off.
        gain: ``"exponential"``, g = 2^y - 1, or ``"linear"``, g = y.
        positive_above: Lists without a label above this are skipped; gains use every label.

    Example:
        >>> dcg_at(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[2.0, 1.0, 0.0]]), k=2)[0]
        tensor([3.6309], dtype=torch.float64)
    """
    check_lists(scores, mask, labels=labels)
    valid = full_mask(scores) if mask is None else mask
    value = torch.where(valid, gains(labels.double(), check_gain(gain)), 0.0)
    ordered = value.gather(-1, descending_order(scores, mask, labels))
    cut = None if k is None else check_count("k", k)
    counted = (valid & (labels > positive_above)).any(-1)
    dcg = (ordered * rank_discounts(value.shape[-1], cut, value)).sum(-1)
    return torch.where(counted, dcg, 0.0), counted


def average_precision_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int | None = None, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return AP@k per list, the mean over positives of the precision at their ranks. Its mean over lists is MAP@k.

    AP@k = sum over positives with rank r <= k of (positives up to rank r) / r, divided by min(k, positives). A perfect
    order gives 1.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).
        k: Cut-off; None = no cut-off.
        positive_above: Items with a label above this are positive.

    Example:
        >>> average_precision_at(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]]))[0]
        tensor([0.8333], dtype=torch.float64)
    """
    hits, ranks, positives = _hits(scores, labels, mask, k, positive_above)
    wanted = positives if k is None else positives.clamp_max(k)
    total = (hits * hits.cumsum(-1) / ranks).sum(-1)
    return torch.where(wanted > 0, total / wanted.clamp_min(1), 0.0), positives > 0


def reciprocal_rank_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int | None = None, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return 1 / r per list, with r the rank of the first positive, or 0 if r > k. Its mean over lists is MRR@k.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).
        k: Cut-off; None = no cut-off.
        positive_above: Items with a label above this are positive.

    Example:
        >>> reciprocal_rank_at(torch.tensor([[4.0, 3.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0]]))[0]
        tensor([0.5000], dtype=torch.float64)
    """
    hits, ranks, positives = _hits(scores, labels, mask, k, positive_above)
    return (hits / ranks).amax(-1) if scores.shape[-1] else hits.sum(-1), positives > 0


def precision_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return precision@k per list: the share of positives among the k items with the best scores.

    In a list with fewer than k valid items the divisor is their number.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).
        k: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> precision_at(torch.tensor([[4.0, 3.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0]]), k=2)[0]
        tensor([0.5000], dtype=torch.float64)
    """
    hits, _, positives = _hits(scores, labels, mask, k, positive_above)
    shown = (full_mask(scores) if mask is None else mask).sum(-1).clamp_max(k)
    return hits.sum(-1) / shown.clamp_min(1), positives > 0


def _hits(
    scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | None, positive_above: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 for each rank r <= k with a positive item, else 0, float64 (B, N), the ranks 1..N, and the positives."""
    check_lists(scores, mask, labels=labels)
    cut = scores.shape[-1] if k is None else check_count("k", k)
    positive = labels > positive_above if mask is None else (labels > positive_above) & mask
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    hits = positive.gather(-1, descending_order(scores, mask, labels)) & (ranks <= cut)
    return hits.double(), ranks, positive.sum(-1)
