"""The k-th and (k+1)-th largest valid score of each list, without sorting long lists."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recsys_topk.numerics import is_full, masked_mean
from recsys_topk.ops.dispatch import apply, is_real, operation, save
from recsys_topk.ops.selection.fill_masked import fill_masked

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

# Crossovers on CPU, measured with `recsys-topk bench operators` shapes (docs/benchmarks.md): numpy sorts short rows
# with SIMD networks faster than it partitions them.
SORT_UP_TO = 512
GROUP = 16
GROUPS_PER_ITEM = 3
SAMPLE = 4096
SAMPLE_FROM = 20_000
SCRATCH_LIMIT = 2**26


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
    kept, cut = apply(_KthPair, filled, k)
    return kept, cut


def kth_values(filled: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return (x_[k], x_[k+1]), each (B, 1), without gradient.

    Args:
        filled: (B, N), -inf where masked.
        k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items.
    """
    if isinstance(k, Tensor):
        return kth_largest(filled.detach(), k, 0)
    return kth_largest(filled.detach(), None, k)


def _fake_pair(filled: Tensor, ks: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    shape = (filled.shape[0], 1)
    return filled.new_empty(shape), filled.new_empty(shape)


@operation(fake=_fake_pair)
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


class _KthPair(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(filled: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
        return kth_values(filled, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int | Tensor], output: tuple[Tensor, Tensor]) -> None:
        save(ctx, inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, grad_kept: Tensor, grad_cut: Tensor) -> tuple[Tensor, None]:
        filled, kept, cut = ctx.saved_tensors
        return share_pair(filled.detach(), kept.detach(), cut.detach(), grad_kept, grad_cut), None

    @staticmethod
    def tangents(ctx: Any, tangent: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        filled, kept, cut = (x.detach() for x in ctx.saved_tensors)
        return masked_mean(tangent, filled == kept)[:, None], masked_mean(tangent, filled == cut)[:, None]


@operation
def share_pair(filled: Tensor, kept: Tensor, cut: Tensor, grad_kept: Tensor, grad_cut: Tensor) -> Tensor:
    """Return the gradient of the k-th pair, (B, N): each part is spread evenly over the items equal to its value.

    Args:
        filled: (B, N), -inf where masked.
        kept: x_[k], (B, 1).
        cut: x_[k+1], (B, 1).
        grad_kept: Gradient of `kept`, (B, 1).
        grad_cut: Gradient of `cut`, (B, 1).
    """
    at_kept, at_cut = filled == kept, filled == cut
    per_kept = grad_kept / at_kept.sum(1, keepdim=True).clamp_min(1)
    per_cut = grad_cut / at_cut.sum(1, keepdim=True).clamp_min(1)
    return torch.where(at_kept, per_kept, 0.0) + torch.where(at_cut, per_cut, 0.0)


def _plain_gradient(filled: Tensor, kept: Tensor, cut: Tensor, grad_kept: Tensor, grad_cut: Tensor) -> bool:
    return is_real(filled) and is_real(grad_kept) and not torch.is_grad_enabled()


@share_pair.backend("numpy", _plain_gradient)
def _share_numpy(filled: Tensor, kept: Tensor, cut: Tensor, grad_kept: Tensor, grad_cut: Tensor) -> Tensor:
    a = filled.numpy()
    grad = np.zeros(a.shape, a.dtype)
    add_shared(grad, a, kept.numpy(), grad_kept.numpy()[:, 0])
    add_shared(grad, a, cut.numpy(), grad_cut.numpy()[:, 0])
    return torch.from_numpy(grad)


def add_shared(out: Array, a: Array, value: Array, amount: Array) -> None:
    """Add to each row of `out` its `amount`, spread evenly over the items of `a` equal to the row's `value`.

    Args:
        out: (B, N), C-contiguous, changed in place.
        a: (B, N).
        value: (B, 1).
        amount: (B,).
    """
    where = (a == value).reshape(-1).nonzero()[0]
    if where.size == a.shape[0]:  # no ties: one item per row, in the order of the rows
        out.reshape(-1)[where] += amount
        return
    rows = where // a.shape[1]
    counts = np.bincount(rows, minlength=a.shape[0])
    out.reshape(-1)[where] += (amount / np.maximum(counts, 1).astype(out.dtype))[rows]


class _Buffers(threading.local):
    """Memory that the selections of a thread reuse, because new pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)


_buffers = _Buffers()


def scratch(like: Array, count: int) -> Array:
    """Return `count` uninitialised arrays of the shape and dtype of `like`, stacked.

    Arrays of up to 64 MB are in memory that the next call of the thread reuses, so use them only until then.
    """
    size = count * like.size * like.itemsize
    if size > SCRATCH_LIMIT:
        return np.empty((count, *like.shape), like.dtype)
    if _buffers.memory.size < size:
        _buffers.memory = np.empty(size, np.uint8)
    return _buffers.memory[:size].view(like.dtype).reshape(count, *like.shape)


def pair_numpy(a: Array, k: int | Array, reuse: bool = False) -> tuple[Array, Array]:
    """Return (x_[k], x_[k+1]) of the rows of `a`, each (B,); `k` is one int, or one int per row, 1 <= k < N.

    With `reuse`, short rows are sorted in the memory of `scratch`.
    """
    n = a.shape[1]
    if not isinstance(k, (int, np.integer)):
        if a.shape[0] == 0:
            return a[:, 0].copy(), a[:, 0].copy()
        low, high = int(k.min()), int(k.max())
        if low != high:
            # The rows have different k: only the items that the largest k needs are sorted.
            shallow = n > SORT_UP_TO and 2 * (high + 1) < n
            top = _sorted(_largest(a, high + 1), reuse) if shallow else _sorted(a, reuse)
            place = top.shape[1] - k[:, None]
            return np.take_along_axis(top, place, 1)[:, 0], np.take_along_axis(top, place - 1, 1)[:, 0]
        k = high
    if n <= SORT_UP_TO:
        ordered = _sorted(a, reuse)
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


def _sorted(a: Array, reuse: bool) -> Array:
    ordered: Array = scratch(a, 1)[0] if reuse else np.empty_like(a)
    np.copyto(ordered, a)
    ordered.sort(axis=1)
    return ordered


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
