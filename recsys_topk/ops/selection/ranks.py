"""Orders and ranks of lists. Among equal scores the lower label ranks first. Losses and metrics use them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import at_least_float32, is_full
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.dispatch import is_float32, is_real, may_read, operation
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.sorting import sort_descending

_PACK_LISTS, _RANK_LISTS, _WEIGH_LISTS = (
    Loop(f"recsys_topk.ops.backends.compiled.ranks:{name}") for name in ("pack_lists", "rank_lists", "weigh_lists")
)


def descending_order(scores: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """Return the indices that sort each list by descending score, masked items last, (B, N).

    Equal scores keep their order in the list. With `labels`, the item with the lower label comes first. NaN ranks last
    among the valid items.

    Example:
        >>> descending_order(torch.tensor([[1.0, 2.0, 1.0]]), labels=torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([[1, 2, 0]])
    """
    x = at_least_float32(scores.detach())
    limits = torch.finfo(x.dtype)
    x = torch.nan_to_num(x, nan=limits.min, posinf=limits.max, neginf=limits.min)
    if mask is not None:
        x = torch.where(mask, x, -math.inf)
    if labels is None:
        return sort_descending(x)[1] if x.dim() == 2 else x.argsort(dim=-1, descending=True, stable=True)
    by_label = labels.argsort(dim=-1, stable=True)
    return by_label.gather(-1, x.gather(-1, by_label).argsort(dim=-1, descending=True, stable=True))


@operation
def tie_ranks(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return 1-based ranks by descending score that do not depend on the order of the items, (B, N).

    Among equal scores the lower label ranks first, so that a positive that ties with negatives still gets a gradient.
    (With mid-ranks, all items of a constant model would have the same rank, and LambdaRank a gradient of 0.) Items with
    equal score and label get the mean of their ranks. Masked items have the rank N.

    Example:
        >>> ones = torch.ones(1, 4, dtype=torch.bool)
        >>> tie_ranks(torch.tensor([[5.0, 5.0, 9.0, 5.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]), ones)
        tensor([[4.0000, 2.5000, 1.0000, 2.5000]])
    """
    order = descending_order(scores, mask)
    x, valid = scores.detach().gather(-1, order), mask.gather(-1, order)
    if may_read(x) and not bool(((x[:, 1:] == x[:, :-1]) & valid[:, 1:]).any()):
        places = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device).expand_as(x)
        return torch.empty_like(x).scatter_(-1, order, places.masked_fill(~valid, x.shape[-1]))
    order = descending_order(scores, mask, labels)
    x, y, valid = scores.detach().gather(-1, order), labels.gather(-1, order), mask.gather(-1, order)
    first, last = tie_groups((x[:, 1:] != x[:, :-1]) | (y[:, 1:] != y[:, :-1]) | (valid[:, 1:] != valid[:, :-1]))
    middle = torch.where(valid, (first + last).to(x.dtype) * 0.5 + 1.0, x.shape[-1])
    return torch.empty_like(middle).scatter(-1, order, middle)


def weighted_ranks(scores: Tensor, labels: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Return the ranks of `tie_ranks` in a list that has w copies of an item of weight w, (B, N).

    Copies have equal scores and labels: they get the mean of their ranks. A rank is at least 1 plus the weight of the
    items above.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: Boolean (B, N).
        weights: (B, N), 0 where masked; None = 1.

    Example:
        >>> ones = torch.ones(1, 3, dtype=torch.bool)
        >>> weighted_ranks(torch.tensor([[3.0, 2.0, 1.0]]), torch.zeros(1, 3), ones, torch.tensor([[1.0, 2.0, 1.0]]))
        tensor([[1.0000, 2.5000, 4.0000]])
    """
    if weights is None:
        return tie_ranks(scores, labels, mask)
    return ranks_of_copies(tie_ranks(scores, labels, mask), weights)


@operation
def ranks_of_copies(ranks: Tensor, weights: Tensor) -> Tensor:
    """Return the mean rank of the copies of each item, (B, N), from the ranks of the items and their weights."""
    above, held = weights_above(ranks, weights)
    return (1.0 + above + 0.5 * (held - 1.0).clamp_min(0.0)).to(ranks.dtype)


def weights_above(ranks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of the items with a smaller rank, and of those with an equal rank, (B, N) float64 each."""
    place = (2.0 * ranks).long()
    held = weights.new_zeros(len(weights), 2 * weights.shape[1] + 1, dtype=torch.float64)
    held = held.scatter_add(1, place, weights.detach().double())
    equal = held.gather(1, place)
    return held.cumsum(1).gather(1, place) - equal, equal


def weigh_lists(ranks: Tensor, weights: Tensor, k: Tensor | None, sums: Tensor | None) -> Tensor:
    """Return `ranks_of_copies`, or the mean discounts for a table of their sums; see the loop of this name."""
    lists, n = ranks.shape
    buffers, result = torch.empty(number_of_parts(lists), 2 * n + 1, dtype=torch.float64), torch.empty(lists, n)
    given = (ranks.contiguous(), weights.detach().contiguous(), None if k is None else k.double().contiguous(), sums)
    run_parts(_WEIGH_LISTS, lists, n, *given, buffers, result)
    return result


ranks_of_copies.backend("numba", lambda ranks, weights: is_float32(ranks, weights) and ranks.numel() > 0)(
    lambda ranks, weights: weigh_lists(ranks, weights, None, None)
)


def _serves(scores: Tensor, labels: Tensor, mask: Tensor) -> bool:
    return is_float32(scores, labels) and is_real(mask) and scores.numel() > 0


@tie_ranks.backend("numba", _serves)
def _numba(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    packed = packed_order(scores, mask)
    if packed is None:
        return tie_ranks.reference(scores, labels, mask)
    valid = np.full(len(scores), scores.shape[1]) if is_full(mask) else count_true(mask).numpy()
    ranks = np.empty(scores.shape, np.float32)
    run_parts(_RANK_LISTS, len(scores), packed.numpy(), valid, labels.detach().contiguous().numpy(), ranks)
    return torch.from_numpy(ranks)


def packed_order(scores: Tensor, mask: Tensor) -> Tensor | None:
    """Return (B, N) int64 whose lower half is the order of each list by descending score, masked items last.

    Needs numba. The upper half is the same for equal scores. None if a score is not finite.

    Args:
        scores: (B, N), ordinary float32 memory.
        mask: Boolean (B, N).
    """
    x = scores.detach().contiguous().numpy()
    real = np.zeros((0, 0), np.bool_) if is_full(mask) else mask.contiguous().numpy()
    packed, finite = np.empty(x.shape, np.int64), np.empty(number_of_parts(len(x)), np.bool_)
    run_parts(_PACK_LISTS, len(x), x, real, packed, finite)
    if not finite.all():
        return None
    packed.sort(axis=1)
    return torch.from_numpy(packed)


def tie_groups(changes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last position, from 0, of the group of ties at each position of a sorted list, (B, N) each.

    Args:
        changes: Boolean (B, N - 1), whether an item differs from the item before it.

    Example:
        >>> tie_groups(torch.tensor([[False, True]]))
        (tensor([[0, 0, 2]]), tensor([[1, 1, 2]]))
    """
    n = changes.shape[-1] + 1
    edge = torch.ones((*changes.shape[:-1], 1), dtype=torch.bool, device=changes.device)
    place = torch.arange(n, device=changes.device)
    first = torch.where(torch.cat([edge, changes], -1), place, 0).cummax(-1).values
    last = torch.where(torch.cat([changes, edge], -1), place, n).flip(-1).cummin(-1).values.flip(-1)
    return first, last
