"""Recall of the true top k among the best m items, in a given selection, or after all stages of a cascade."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.checks import check_count, check_lists
from recsys_topk.numerics import full_mask
from recsys_topk.ops.selection.ranks import descending_order


def top(scores: Tensor, m: int, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """Return the m best valid items of each list, boolean (B, N). Ties are ordered as in `descending_order`.

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
    """Return the items that each stage of a cascade passes on, boolean (S, B, N).

    Stage 0 keeps its `quotas[0]` best valid items, stage 1 the `quotas[1]` best of those, and so on.

    Args:
        stage_scores: One (B, N) tensor per stage, all over the same candidates.
        mask: (B, N).
        quotas: How many items each stage passes on.
        labels: Used for ties in metrics: among equal scores, the item with the lower label passes. Without labels, the
            first item passes.

    Example:
        >>> survivors([torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])], quotas=(3, 1))
        tensor([[[ True,  True,  True, False]],
        <BLANKLINE>
                [[False, False,  True, False]]])
    """
    if len(stage_scores) != len(quotas) or not quotas:
        raise ValueError(
            f"a cascade needs one quota per stage, got {len(stage_scores)} stages and quotas {tuple(quotas)}"
        )
    for scores in stage_scores:
        check_lists(scores, mask, labels=labels, first_stage_scores=stage_scores[0])
    passed = []
    alive = full_mask(stage_scores[0]) if mask is None else mask
    for scores, quota in zip(stage_scores, quotas, strict=True):
        alive = top(scores, check_count("quotas", quota), alive, labels)
        passed.append(alive)
    return torch.stack(passed)


def recall_of(
    selected: Tensor, labels: Tensor, mask: Tensor | None = None, *, k: int, positive_above: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the share of the true top k that is `selected`, per list.

    The true top k are the k valid positive items with the largest labels. If labels are tied at the boundary there are
    several such sets, and the one with the most selected items is used: all items above the boundary belong to it, and
    selected items at the boundary fill it up to k. The value is hits / min(k, positives), so a perfect selection gives
    1.

    Args:
        selected: Boolean (B, N), the selected items.
        labels: (B, N).
        mask: (B, N).
        k: Size of the true set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> recall_of(torch.tensor([[True, True, False]]), torch.tensor([[2.0, 0.0, 1.0]]), k=2)
        (tensor([0.5000], dtype=torch.float64), tensor([True]))
    """
    k = check_count("k", k)
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
    """Return recall@k@m per list: the share of the true top k that is among the m items with the best scores.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).
        k: Size of the true set (see `recall_of`); k >= N includes every positive.
        m: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> recall_at(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]), k=2, m=2)
        (tensor([0.5000], dtype=torch.float64), tensor([True]))
    """
    check_lists(scores, mask, labels=labels)
    chosen = top(scores, check_count("m", m), mask, labels)
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
    """Return the share of the true top k that survives all stages of a cascade, per list.

    Args:
        stage_scores: One (B, N) tensor per stage, all over the same candidates.
        labels: (B, N).
        mask: (B, N).
        quotas: How many items each stage passes on (see `survivors`).
        k: Size of the true set (see `recall_of`).
        positive_above: Items with a label above this are positive.

    Example:
        >>> retriever, ranker = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> joint_recall([retriever, ranker], torch.tensor([[0.0, 0.0, 1.0, 1.0]]), quotas=(3, 2), k=2)
        (tensor([0.5000], dtype=torch.float64), tensor([True]))
    """
    final = survivors(stage_scores, mask, quotas=quotas, labels=labels)[-1]
    return recall_of(final, labels, mask, k=k, positive_above=positive_above)
