"""Metrics of ranked lists and of cascades, as functions of tensors: one value a list. Needs torch only.

Conventions, the same for all of them:

- Lists are rows. `mask` is boolean, True = a real item; padding never competes for a place, whatever its score.
- An item is *positive* when its label is above `positive_above`. A list without a valid positive says nothing about
  the model: its value is 0 and its entry in `counted` is False.
- Ties go against the model: among equal scores the item with the lower label comes first. A model that scores
  everything alike can therefore not profit from the order in which the data hold their positives.
- A NaN score ranks last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.checks import check_lists
from recsys_topk.numerics import full_mask
from recsys_topk.ops.dcg import Gain, check_gain, gains, ideal_dcg, rank_discounts
from recsys_topk.ops.ranks import descending_order

# Pairwise comparisons are made for as many lists at a time as fit in this many booleans.
PAIRS_AT_A_TIME = 1 << 22


def top(scores: Tensor, m: int, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """Return which valid items are among the m best of their list, boolean (B, N); ties as in `descending_order`.

    Example:
        >>> top(torch.tensor([[3.0, 1.0, 2.0]]), 2)
        tensor([[ True, False,  True]])
    """
    best = descending_order(scores, mask, labels)[..., :m]
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    return chosen if mask is None else chosen & mask


def survivors(
    stage_scores: Sequence[Tensor], mask: Tensor | None = None, *, quotas: Sequence[int], labels: Tensor | None = None
) -> Tensor:
    """Return what each stage of a cascade lets through, boolean (S, B, N).

    Stage 0 keeps its `quotas[0]` best valid items, stage 1 the `quotas[1]` best of those, and so on.

    Args:
        stage_scores: One (B, N) tensor a stage, all over the same candidates.
        mask: Boolean (B, N), True = a real item; None = all are.
        quotas: How many items each stage passes on.
        labels: For metrics only: with labels, equal scores go to the item with the lower label; without, to the one
            that stands first.

    Example:
        >>> survivors([torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])], quotas=(3, 1))
        tensor([[[ True,  True,  True, False]],
        <BLANKLINE>
                [[False, False,  True, False]]])
    """
    if len(stage_scores) != len(quotas) or not quotas:
        raise ValueError(
            f"a cascade needs one quota a stage, got {len(stage_scores)} stages and quotas {tuple(quotas)}"
        )
    for scores in stage_scores:
        check_lists(scores, mask, labels=labels, first_stage_scores=stage_scores[0])
    passed = []
    alive = full_mask(stage_scores[0]) if mask is None else mask
    for scores, quota in zip(stage_scores, quotas, strict=True):
        alive = top(scores, _count("quotas", quota), alive, labels)
        passed.append(alive)
    return torch.stack(passed)


def recall_of(
    selected: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return how much of the true top k lies in a set of items that has been `selected`, per list.

    The true top k are the k valid positive items with the largest labels. Where labels tie at the boundary there are
    several such sets, and the one that suits the selection best is taken: every item above the boundary counts, items
    on it count until k are full. The value is hits / min(k, positives), so a perfect selection scores 1.

    Args:
        selected: Boolean (B, N), the items that a model chose.
        labels: (B, N), bigger is better.
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Size of the true set.
        positive_above: Items with a label above this are positive.

    Returns:
        The recall of each list, float64 (B,), and which lists have a positive, boolean (B,).

    Example:
        >>> recall_of(torch.tensor([[True, True, False]]), torch.tensor([[2.0, 0.0, 1.0]]), k=2)
        (tensor([0.5000], dtype=torch.float64), tensor([True]))
    """
    k = _count("k", k)
    positive = labels > positive_above
    if mask is not None:
        positive = positive & mask
    best = torch.where(positive, labels.double(), -math.inf).topk(min(k, labels.shape[-1]), dim=-1).values
    if best.shape[-1] == 0:
        empty = torch.zeros(labels.shape[0], dtype=torch.float64, device=labels.device)
        return empty, empty.bool()
    wanted = positive.sum(-1).clamp_max(k)
    boundary = best.gather(-1, (wanted - 1).clamp_min(0)[:, None])
    above = positive & (labels > boundary)
    level = positive & (labels == boundary)
    hits = (above & selected).sum(-1) + torch.minimum((level & selected).sum(-1), wanted - above.sum(-1))
    counted = wanted > 0
    return hits.double() / wanted.clamp_min(1), counted


def recall_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int, m: int, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return recall@k@m: how much of the true top k is among the m items with the best scores, per list.

    Args:
        scores: (B, N).
        labels: (B, N), bigger is better.
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Size of the true set (see `recall_of`); N or more takes every positive.
        m: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Returns:
        The recall of each list, float64 (B,), and which lists have a positive, boolean (B,).

    Example:
        >>> recall_at(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]), k=2, m=2)
        (tensor([0.5000], dtype=torch.float64), tensor([True]))
    """
    check_lists(scores, mask, labels=labels)
    chosen = top(scores, _count("m", m), mask, labels)
    return recall_of(chosen, labels, mask, k=k, positive_above=positive_above)


def joint_recall(
    stage_scores: Sequence[Tensor],
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    quotas: Sequence[int],
    k: int,
    positive_above: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return how much of the true top k survives all stages of a cascade, per list.

    Args:
        stage_scores: One (B, N) tensor a stage, all over the same candidates.
        labels: (B, N), bigger is better.
        mask: Boolean (B, N), True = a real item; None = all are.
        quotas: How many items each stage passes on (see `survivors`).
        k: Size of the true set (see `recall_of`).
        positive_above: Items with a label above this are positive.

    Returns:
        The recall of each list, float64 (B,), and which lists have a positive, boolean (B,).

    Example:
        >>> retriever, ranker = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> joint_recall([retriever, ranker], torch.tensor([[0.0, 0.0, 1.0, 1.0]]), quotas=(3, 2), k=2)
        (tensor([0.5000], dtype=torch.float64), tensor([True]))
    """
    final = survivors(stage_scores, mask, quotas=quotas, labels=labels)[-1]
    return recall_of(final, labels, mask, k=k, positive_above=positive_above)


def ndcg_at(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    k: int | None = None,
    gain: Gain = "exponential",
    positive_above: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return NDCG@k: sum_{r <= k} g(y at rank r) / log2(1 + r), divided by its best value, per list.

    Args:
        scores: (B, N).
        labels: (B, N), finite and >= 0.
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Where to cut; None = nowhere.
        gain: ``"exponential"``, g = 2^y - 1, or ``"linear"``, g = y (for labels such as RecFlow's 29..20).
        positive_above: Only lists with a label above this are counted; every label has its gain.

    Returns:
        The NDCG of each list, float64 (B,), and which lists are counted, boolean (B,).

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
    """Return DCG@k: sum_{r <= k} g(y at rank r) / log2(1 + r), per list.

    Args:
        scores: (B, N).
        labels: (B, N), finite and >= 0.
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Where to cut; None = nowhere.
        gain: ``"exponential"``, g = 2^y - 1, or ``"linear"``, g = y.
        positive_above: Only lists with a label above this are counted; every label has its gain.

    Returns:
        The DCG of each list, float64 (B,), and which lists are counted, boolean (B,).

    Example:
        >>> dcg_at(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[2.0, 1.0, 0.0]]), k=2)[0]
        tensor([3.6309], dtype=torch.float64)
    """
    check_lists(scores, mask, labels=labels)
    valid = full_mask(scores) if mask is None else mask
    value = torch.where(valid, gains(labels.double(), check_gain(gain)), 0.0)
    ordered = value.gather(-1, descending_order(scores, mask, labels))
    cut = None if k is None else _count("k", k)
    counted = (valid & (labels > positive_above)).any(-1)
    dcg = (ordered * rank_discounts(value.shape[-1], cut, value)).sum(-1)
    return torch.where(counted, dcg, 0.0), counted


def average_precision_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int | None = None, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return AP@k, the mean over positives of the precision at their ranks, per list; its mean over lists is MAP@k.

    AP@k = sum over positives with rank r <= k of (positives up to rank r) / r, divided by min(k, positives): a perfect
    order scores 1.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Where to cut; None = nowhere.
        positive_above: Items with a label above this are positive.

    Returns:
        The AP of each list, float64 (B,), and which lists have a positive, boolean (B,).

    Example:
        >>> average_precision_at(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]]))[0]
        tensor([0.8333], dtype=torch.float64)
    """
    hits, ranks = _hits(scores, labels, mask, k, positive_above)
    positives = _positives(labels, mask, positive_above)
    wanted = positives if k is None else positives.clamp_max(k)
    total = (hits * hits.cumsum(-1) / ranks).sum(-1)
    return torch.where(wanted > 0, total / wanted.clamp_min(1), 0.0), positives > 0


def reciprocal_rank_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int | None = None, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return 1 / r, r the rank of the best-ranked positive, 0 if r > k, per list; its mean over lists is MRR@k.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Where to cut; None = nowhere.
        positive_above: Items with a label above this are positive.

    Returns:
        The reciprocal rank of each list, float64 (B,), and which lists have a positive, boolean (B,).

    Example:
        >>> reciprocal_rank_at(torch.tensor([[4.0, 3.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0]]))[0]
        tensor([0.5000], dtype=torch.float64)
    """
    hits, ranks = _hits(scores, labels, mask, k, positive_above)
    found = (hits / ranks).amax(-1) if scores.shape[-1] else hits.sum(-1)
    return found, _positives(labels, mask, positive_above) > 0


def precision_at(
    scores: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return precision@k: how many of the k items with the best scores are positive, as a share, per list.

    A list with fewer than k valid items is divided by their number.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: Boolean (B, N), True = a real item; None = all are.
        k: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Returns:
        The precision of each list, float64 (B,), and which lists have a positive, boolean (B,).

    Example:
        >>> precision_at(torch.tensor([[4.0, 3.0, 2.0]]), torch.tensor([[0.0, 1.0, 1.0]]), k=2)[0]
        tensor([0.5000], dtype=torch.float64)
    """
    hits, _ = _hits(scores, labels, mask, k, positive_above)
    shown = (full_mask(scores) if mask is None else mask).sum(-1).clamp_max(k)
    return hits.sum(-1) / shown.clamp_min(1), _positives(labels, mask, positive_above) > 0


def _hits(
    scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | None, positive_above: float
) -> tuple[Tensor, Tensor]:
    """Return which of the first k places hold a positive item, float64 (B, N), and the ranks 1..N, (N,)."""
    check_lists(scores, mask, labels=labels)
    cut = scores.shape[-1] if k is None else _count("k", k)
    positive = labels > positive_above if mask is None else (labels > positive_above) & mask
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    return (positive.gather(-1, descending_order(scores, mask, labels)) & (ranks <= cut)).double(), ranks


def _positives(labels: Tensor, mask: Tensor | None, positive_above: float) -> Tensor:
    """Return the number of valid positive items, int64 (B,)."""
    positive = labels > positive_above
    return (positive if mask is None else positive & mask).sum(-1)


def kendall_tau(scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return Kendall's tau between scores and labels, per list.

    tau = (concordant - discordant) / (pairs of valid items with different labels). Pairs with equal scores are
    neither, so a constant model scores 0; a perfect order scores 1 even where labels tie (Somers' D of the scores
    given the labels; without ties it is Kendall's tau). O(N^2) time; memory is bounded whatever the number of lists.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: Boolean (B, N), True = a real item; None = all are.

    Returns:
        tau of each list, float64 (B,), and which lists hold two different labels, boolean (B,).

    Example:
        >>> kendall_tau(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2.0, 1.0, 0.0]]))[0]
        tensor([0.3333], dtype=torch.float64)
    """
    check_lists(scores, mask, labels=labels)
    valid = full_mask(scores) if mask is None else mask
    lists, n = scores.shape
    step = max(1, PAIRS_AT_A_TIME // max(1, n * n))
    agreement = [
        _agreement(scores[i : i + step], labels[i : i + step], valid[i : i + step]) for i in range(0, lists, step)
    ]
    if not agreement:
        empty = torch.zeros(0, dtype=torch.float64, device=scores.device)
        return empty, empty.bool()
    difference = torch.cat([d for d, _ in agreement])
    pairs = torch.cat([p for _, p in agreement])
    return difference.double() / pairs.clamp_min(1), pairs > 0


def _agreement(scores: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return concordant minus discordant pairs, and the pairs with different labels, int64 (B,) each."""
    better = (labels[:, :, None] > labels[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    agree = (better & (scores[:, :, None] > scores[:, None, :])).sum((-2, -1))
    oppose = (better & (scores[:, :, None] < scores[:, None, :])).sum((-2, -1))
    return agree - oppose, better.sum((-2, -1))


def selection_mass(p: Tensor, mask: Tensor | None = None, *, k: int) -> tuple[Tensor, Tensor]:
    """Return sum(p) / k: how many items a soft selection holds for each one it should, per list.

    1 for an operator whose membership sums to k. DFTopK's tends to N / (2 k) as tau grows, which is worth watching.

    Args:
        p: Membership, (B, N), e.g. `SoftSelection.p`.
        mask: Boolean (B, N), True = a real item; None = all are.
        k: How many items were to be selected; capped at the valid items of the list.

    Returns:
        The mass of each list, float64 (B,), and which lists have something to select, boolean (B,).

    Example:
        >>> selection_mass(torch.tensor([[0.9, 0.8, 0.4, 0.1]]), k=2)[0]
        tensor([1.1000], dtype=torch.float64)
    """
    check_lists(p, mask)
    valid = full_mask(p) if mask is None else mask
    wanted = valid.sum(-1).clamp_max(_count("k", k))
    mass = torch.where(valid, p.detach().double(), 0.0).sum(-1)
    return torch.where(wanted > 0, mass / wanted.clamp_min(1), 0.0), wanted > 0


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a non-negative int, got {value!r}")
    return value
