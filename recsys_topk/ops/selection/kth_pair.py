"""The k-th and (k+1)-th largest valid score of each list, without sorting long lists."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.dispatch import is_eager, is_real, operation
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked

Array = npt.NDArray[Any]

# Crossovers on CPU, measured with `recsys-topk bench operators` shapes (docs/benchmarks.md): numpy sorts short rows
# with SIMD networks faster than it partitions them.
SORT_UP_TO = 512
GROUP = 16
GROUPS_PER_ITEM = 3
SAMPLE = 4096
SAMPLE_FROM = 20_000


def kth_pair(scores: Tensor, k: int | Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x_[k], x_[k+1]) of each list, each (B, 1), differentiable.

    The gradient of an order statistic is shared evenly among the valid items that are equal to it. A NaN among the
    valid scores ranks above every number, as in `torch.sort`. O(N) per list on a CPU (a SIMD sort for N <= 512, else a
    partition of the items that pass a filter); `torch.topk` or a sort elsewhere.

    Args:
        scores: (B, N), float32 or float64.
        k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items.
        mask: Boolean (B, N).

    Example:
        >>> from recsys_topk.numerics import full_mask
        >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> kth_pair(x, 2, full_mask(x))
        (tensor([[2.]]), tensor([[1.]]))
    """
    filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
    kept, cut = kth_values(filled, k)
    if is_eager() and not (filled.requires_grad and torch.is_grad_enabled()):
        return kept, cut
    return with_shared_gradient(kept, filled), with_shared_gradient(cut, filled)


def kth_values(filled: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return (x_[k], x_[k+1]), each (B, 1), without gradient.

    Args:
        filled: (B, N), -inf where masked.
        k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items.
    """
    if isinstance(k, Tensor):
        return kth_largest(filled.detach(), k, 0)
    return kth_largest(filled.detach(), None, k)


@operation(fake=lambda filled, *_: tuple(filled.new_empty(filled.shape[0], 1) for _ in range(2)))
def kth_largest(filled: Tensor, ks: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return (x_[k], x_[k+1]) of each row, each (B, 1), for one k per row (`ks`) or one for all (`k`)."""
    if ks is None:
        top = filled.topk(k + 1, dim=1).values
        return top[:, k - 1 : k].contiguous(), top[:, k : k + 1].contiguous()
    ordered = filled.sort(dim=1, descending=True).values
    return ordered.gather(1, ks[:, None] - 1), ordered.gather(1, ks[:, None])


@kth_largest.backend("numpy", lambda filled, ks, k: is_real(filled))
def _numpy(filled: Tensor, ks: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    kept, cut = pair_numpy(filled.numpy(), k if ks is None else ks.numpy())
    return torch.from_numpy(kept).unsqueeze(1), torch.from_numpy(cut).unsqueeze(1)


def with_shared_gradient(value: Tensor, filled: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return `value`, (B, 1), with a gradient that the items equal to it share, in proportion to their weights.

    Args:
        value: A score of each list, (B, 1), a constant.
        filled: (B, N), -inf where masked.
        weights: (B, N); None = 1.
    """
    tied, moved = filled.detach() == value, filled - filled.detach()
    if weights is not None:
        moved, tied_weights = moved * weights, torch.where(tied, weights, 0.0).sum(-1)
    else:
        tied_weights = count_true(tied).to(filled.dtype)
    total = torch.where(tied, moved, 0.0).sum(-1) / tied_weights.clamp_min(torch.finfo(filled.dtype).tiny)
    return value + total[:, None]


def pair_numpy(a: Array, k: int | Array) -> tuple[Array, Array]:
    """Return (x_[k], x_[k+1]) of the rows of `a`, each (B,); `k` is one int, or one int per row, 1 <= k < N."""
    n = a.shape[1]
    if not isinstance(k, (int, np.integer)):
        if a.shape[0] == 0:
            return a[:, 0].copy(), a[:, 0].copy()
        low, high = int(k.min()), int(k.max())
        if low != high:
            # The rows have different k: only the items that the largest k needs are sorted.
            shallow = n > SORT_UP_TO and 2 * (high + 1) < n
            top = np.sort(_largest(a, high + 1) if shallow else a, axis=1)
            place = top.shape[1] - k[:, None]
            return np.take_along_axis(top, place, 1)[:, 0], np.take_along_axis(top, place - 1, 1)[:, 0]
        k = high
    if n <= SORT_UP_TO:
        ordered = np.sort(a, axis=1)
        return ordered[:, n - k].copy(), ordered[:, n - k - 1].copy()
    if 2 * k > n:
        smaller = np.partition(a, n - k, axis=1)
        return smaller[:, n - k].copy(), smaller[:, : n - k].max(1)
    top = _largest(a, k + 1)
    if top.shape[1] > SORT_UP_TO or top.shape[0] == 1:
        top.partition(0, axis=1)
        return top[:, 1:].min(1), top[:, 0].copy()
    top.sort(axis=1)
    return top[:, 1].copy(), top[:, 0].copy()


def _largest(a: Array, count: int) -> Array:
    """Return the `count` largest entries of each row, in no order, in a new array (B, count)."""
    n = a.shape[1]
    if n >= SAMPLE_FROM and 8 * count < n:
        return np.stack([_largest_of_long_row(row, count) for row in a])
    if n >= GROUPS_PER_ITEM * GROUP * count:
        a = _prefilter_groups(a, count)
        n = a.shape[1]
    parted: Array = np.partition(a, n - count, axis=1)
    return parted[:, n - count :]


def _prefilter_groups(a: Array, count: int) -> Array:
    """Return the items of the `count` strided groups with the largest maxima; the `count` largest are among them."""
    rows, n = a.shape
    groups = n // GROUP
    body = a[:, : groups * GROUP].reshape(rows, GROUP, groups)
    best = np.argpartition(body.max(1), groups - count, axis=1)[:, groups - count :]
    kept = np.take_along_axis(body, best[:, None, :], axis=2).reshape(rows, -1)
    return np.concatenate([kept, a[:, groups * GROUP :]], axis=1) if groups * GROUP < n else kept


def _largest_of_long_row(row: Array, count: int) -> Array:
    """Return the `count` largest entries: those not below a bound from a strided sample are partitioned (exact)."""
    sample = row[:: max(1, row.size // SAMPLE)]
    expected = count / row.size * sample.size
    rank = int(expected + 4.0 * math.sqrt(expected) + 4.0)
    if rank < sample.size:
        bound = np.partition(sample, sample.size - rank)[sample.size - rank]
        candidates = row[~(row < bound)]  # NaN is kept, because it ranks above every number
        if candidates.size >= count:
            row = candidates
    return np.partition(row, row.size - count)[row.size - count :]
