"""Top-k losses of lists that are too long for one program: `torch.topk` finds the k-th pair, tiles do the rest.

A kernel runs once per list and tile and writes sums over its tile. Torch adds the sums in a fixed order. The threshold
takes a fixed number of such steps, so that the host reads nothing. The numbers of all lists are the rows of one tensor,
(NUMBERS, lists).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_topk.ops.backends.triton_kernels.rows import (
    BISECTIONS,
    CLIP,
    DFTOPK,
    FENCHEL_YOUNG,
    LAPLACE,
    LAWS,
    LEAST,
    LOGISTIC,
    OPTIONS,
    SQUARING,
    balance_sums,
    bytes_of,
    clip_excess,
    density,
    law_terms,
    nearest,
)
from recsys_topk.ops.losses.find_positives import find_positives

# Number of items of a list that one program holds, and of a tile of a longer list.
LONGEST = 8192
TILE = 2048

# Numbers of a list:
# - x_[k], x_[k+1], and the threshold above x_[k+1] in units of tau;
# - the share of the items equal to x_[k] that is in T (see `balance`), and the distance of the nearest item;
# - the derivative of the threshold: for items equal to x_[k] and to x_[k+1] (DFTOPK), or per unit of density;
# - the sum of the derivatives of the losses, and their factor, which is 0 for a list that does not count.
KEPT, CUT, AT, PART = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NEAR, PER_KEPT, PER_CUT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
TOTAL, RATE = tl.constexpr(7), tl.constexpr(8)
NUMBERS = 9

# Number of steps of `balance` that halve the error. It is at most log n < 20 for n < 2^28, and then less than .16.
HALVING = 7
# Maximum number of sums that a kernel writes per step of a threshold.
SUMS = 7


class LongLists(NamedTuple):
    """Lists in the form that the kernels take.

    Attributes:
        scores: (B, N) float32, -inf where masked; 0 in lists that do not count.
        items: (B, N) bytes: 0 = masked, 1 = valid, 2 = true.
        rank: (B,) int64, k of each list, 1 <= k < number of valid items; 1 in lists that do not count.
        valid: (B,) int64, the number of valid items.
        counted: Boolean (B,).
    """

    scores: Tensor
    items: Tensor
    rank: Tensor
    valid: Tensor
    counted: Tensor


@triton.jit
def tile_of(row, n, BLOCK: tl.constexpr):  # noqa: N803
    """Return the offsets of the items of a tile in a tensor (lists, n), and which of them exist, (1, BLOCK) each."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64)[:, None] * n + at[None, :], (at < n)[None, :]


@triton.jit
def moves_of(x, u, real, numbers_ptr, lists, LAW: tl.constexpr):  # noqa: N803
    """Return the derivative of the threshold of a list with respect to its scores."""
    per_kept = tl.load(numbers_ptr + PER_KEPT * lists)
    if LAW == DFTOPK:
        w = tl.where(x == tl.load(numbers_ptr + KEPT * lists)[:, None], per_kept[:, None], 0.0)
        at_cut = x == tl.load(numbers_ptr + CUT * lists)[:, None]
        w = tl.where(real, w + tl.where(at_cut, tl.load(numbers_ptr + PER_CUT * lists)[:, None], 0.0), 0.0)
    else:
        w = density(u, real, tl.load(numbers_ptr + NEAR * lists), LAW) * per_kept[:, None]
    return w


@triton.jit(do_not_specialize=["lists", "tiles"])
def threshold_sums_kernel(
    x_ptr, numbers_ptr, sums_ptr, lists, tiles, n, tau, LAW: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Write the sums over a tile that a step of the threshold needs, and those of its derivative.

    Args:
        x_ptr: Scores, (lists, n) float32, -inf where masked.
        numbers_ptr: Numbers of the lists, (NUMBERS, lists) float32.
        sums_ptr: (SUMS, lists, tiles) float32, written.
        lists: Number of lists.
        tiles: Number of tiles of a list.
        n: Number of items of a list.
        tau: Temperature.
        LAW: A value of `LAWS`.
        BLOCK: Number of items of a tile.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    place, inside = tile_of(row, n, BLOCK)
    x = tl.load(x_ptr + place, mask=inside, other=float("-inf"))
    real = x > float("-inf")
    kept, cut = tl.load(numbers_ptr + KEPT * lists + row), tl.load(numbers_ptr + CUT * lists + row)
    b = tl.load(numbers_ptr + AT * lists + row)
    out, step = sums_ptr + row.to(tl.int64) * tiles + tl.program_id(1), lists.to(tl.int64) * tiles
    tied = real & (x == kept[:, None])
    z = (x - cut[:, None]) / tau
    if LAW == DFTOPK:
        tl.store(out, tl.sum(tied.to(tl.float32), axis=1))
        tl.store(out + step, tl.sum((real & (x == cut[:, None])).to(tl.float32), axis=1))
    elif (LAW == CLIP) | (LAW == FENCHEL_YOUNG):
        total, fractional = clip_excess(z, b, tl.zeros_like(b))
        tl.store(out, total)
        tl.store(out + step, fractional)
    else:
        part = tl.load(numbers_ptr + PART * lists + row)
        top = tl.where(tied, part[:, None], tl.where(real & (x > kept[:, None]), 1.0, 0.0))
        rest = tl.where(real, 1.0 - top, 0.0)
        sum_p, sum_q, rising, falling, scale = balance_sums(z, top, rest, (kept - cut) / tau, b, LAW)
        u = z - b[:, None]
        near = nearest(u, real)
        tl.store(out, sum_p)
        tl.store(out + step, sum_q)
        tl.store(out + 2 * step, rising)
        tl.store(out + 3 * step, falling)
        tl.store(out + 4 * step, scale)
        tl.store(out + 5 * step, near)
        tl.store(out + 6 * step, tl.sum(density(u, real, near, LAW), axis=1))


@triton.jit(do_not_specialize=["lists", "tiles"])
def long_terms_kernel(
    x_ptr, items_ptr, numbers_ptr, sums_ptr, gradient_ptr, lists, tiles, n, tau, LAW: tl.constexpr,  # noqa: N803
    WRITES: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the sums of the losses of a tile's items and of their derivatives or, with WRITES, the gradient.

    Args:
        x_ptr: Scores, (lists, n) float32, -inf where masked.
        items_ptr: (lists, n) bytes: 0 = masked, 1 = valid, 2 = true.
        numbers_ptr: Numbers of the lists, (NUMBERS, lists) float32.
        sums_ptr: (2, lists, tiles) float32, written unless WRITES.
        gradient_ptr: (lists, n) float32, written if WRITES.
        lists: Number of lists.
        tiles: Number of tiles of a list.
        n: Number of items of a list.
        tau: Temperature.
        LAW: A value of `LAWS`.
        WRITES: Whether to write the gradient; the sums must be known.
        BLOCK: Number of items of a tile.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    place, inside = tile_of(row, n, BLOCK)
    kind = tl.load(items_ptr + place, mask=inside, other=0)
    x = tl.load(x_ptr + place, mask=inside, other=float("-inf"))
    real = kind > 0
    z = (x - tl.load(numbers_ptr + CUT * lists + row)[:, None]) / tau
    u = z - tl.load(numbers_ptr + AT * lists + row)[:, None]
    item, d = law_terms(u, real, kind > 1, tau, LAW)
    if WRITES:
        w = moves_of(x, u, real, numbers_ptr + row, lists, LAW)
        total, rate = tl.load(numbers_ptr + TOTAL * lists + row), tl.load(numbers_ptr + RATE * lists + row)
        moved = (d - w * total[:, None]) * rate[:, None]
        tl.store(gradient_ptr + place, tl.where(rate[:, None] > 0.0, moved, 0.0), mask=inside)
    else:
        out = sums_ptr + row.to(tl.int64) * tiles + tl.program_id(1)
        tl.store(out, tl.sum(item, axis=1))
        tl.store(out + lists.to(tl.int64) * tiles, tl.sum(d, axis=1))


def grid_of(lists: int, n: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of lists and tiles, and the constants and options of the kernels."""
    tile = min(TILE, max(16, triton.next_power_of_2(n)))
    return (lists, triton.cdiv(n, tile)), {"BLOCK": tile, "num_warps": max(1, tile // 256), **OPTIONS}


def long_lists(
    scores: Tensor, labels: Tensor, mask: Tensor | None, ks: Tensor | None, k: int, above: float
) -> LongLists:
    """Return which items are true and which lists count, as `recsys_topk.ops.losses.topk_loss` defines them."""
    n = scores.shape[1]
    positive, positives = find_positives(labels, mask, above)
    valid = torch.full_like(positives, n) if mask is None else mask.sum(1)
    wanted = ks.long() if ks is not None else positives if k < 0 else torch.full_like(valid, k)
    wanted = torch.minimum(wanted, valid)
    counted = (positives > 0) & (wanted > 0) & (wanted < valid)
    rank = torch.where(counted, wanted, 1)
    best = torch.where(positive, labels, -torch.inf).topk(depth_of(n, None if ks is not None or k < 0 else k)).values
    true = positive & (labels >= best.gather(1, rank[:, None] - 1))
    real = torch.ones_like(true) if mask is None else mask
    return LongLists(filled(scores, real, counted), real.to(torch.uint8) + true, rank, valid, counted)


def filled(scores: Tensor, real: Tensor, counted: Tensor) -> Tensor:
    """Return scores in float32, -inf where masked; 0 in lists that do not count, so that they have a k-th pair."""
    return torch.where(counted[:, None], torch.where(real, scores.float(), -torch.inf), 0.0).contiguous()


def depth_of(n: int, k: int | None) -> int:
    """Return how many of the largest of n items to find: k + 1 if k is known on the host, else all."""
    return n if k is None else max(2, min(k + 1, n))


def numbers_of(x: Tensor, rank: Tensor, depth: int, tau: float, alpha: float, law: str) -> Tensor:
    """Return the numbers of the lists, (NUMBERS, B): the k-th pair, the threshold and its derivative; the rest is 0.

    Args:
        x: (B, N), -inf where masked.
        rank: (B,), 1 <= rank < number of valid items and `depth`.
        depth: How many of the largest scores to find.
        tau: Temperature.
        alpha: Only for ``"dftopk"``.
        law: A name of `LAWS`.
    """
    lists, n = x.shape
    grid, tile = grid_of(lists, n)
    code = LAWS[law]
    top = x.topk(depth, dim=1).values
    kept, cut = (top.gather(1, rank[:, None] - 1 + after)[:, 0] for after in (0, 1))
    numbers, sums = x.new_zeros(NUMBERS, lists), x.new_empty(SUMS, *grid)
    numbers[KEPT.value], numbers[CUT.value] = kept, cut
    b, gap = numbers[AT.value], (kept - cut) / tau

    def sums_at_b() -> Tensor:
        if lists:
            threshold_sums_kernel[grid](x, numbers, sums, lists, grid[1], n, tau, code, **tile)
        return sums.sum(2)

    if code in (LOGISTIC.value, LAPLACE.value):
        tied, larger = (x == kept[:, None]).sum(1), (x > kept[:, None]).sum(1)
        numbers[PART.value] = (rank - larger) / tied.to(x.dtype)
        b.copy_(0.5 * gap)
        for step in range(HALVING + SQUARING.value):
            sum_p, sum_q, rising, falling = sums_at_b()[:4]
            h = torch.log(sum_p / sum_q) + sums[4, :, 0]
            b += 0.75 * h if step < HALVING else h / (rising / sum_p + falling / sum_q)
        sums_at_b()
        near = sums[5].amin(1)
        numbers[NEAR.value] = near
        numbers[PER_KEPT.value] = 1.0 / (sums[6] * torch.exp(near[:, None] - sums[5])).sum(1).clamp_min(LEAST.value)
    elif code == DFTOPK.value:
        b.copy_(alpha * gap)
        at_kept, at_cut = sums_at_b()[:2]
        numbers[PER_KEPT.value], numbers[PER_CUT.value] = alpha / at_kept, (1.0 - alpha) / at_cut
    else:
        b.copy_(0.5 * gap - 0.5)
        low, high = torch.where(gap >= 1.0, b, -1.0), torch.where(gap >= 1.0, b, gap)
        for step in range(BISECTIONS.value + 2):
            total, fractional = sums_at_b()[:2]
            excess = total - rank
            if step < BISECTIONS.value:
                low, high = torch.where(excess >= 0.0, b, low), torch.where(excess <= 0.0, b, high)
                b.copy_(0.5 * (low + high))
            else:
                b.copy_(torch.minimum(torch.maximum(b + excess / fractional.clamp_min(1.0), low), high))
        numbers[PER_KEPT.value] = 1.0 / sums_at_b()[1].clamp_min(1.0)
    return numbers


def long_topk_loss(
    scores: Tensor, labels: Tensor, mask: Tensor | None, ks: Tensor | None, k: int, above: float, law: str, tau: float,
    alpha: float, wants: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result of `recsys_topk.ops.backends.triton_kernels.topk_loss.fused_topk_loss`."""
    lists, n = scores.shape
    x, items, rank, valid, counted = long_lists(scores, labels, mask, ks, k, above)
    depth, proper = depth_of(n, None if ks is not None or k < 0 else k), counted
    if law == "fenchel_young":
        true = (items == 2).sum(1)  # more than k if labels tie
        proper, depth = counted & (true < valid), n
        rank = torch.where(proper, true, 1)
    numbers = numbers_of(x, rank, depth, tau, alpha, law)
    grid, tile = grid_of(lists, n)
    sums, gradient = x.new_empty(2, *grid), x.new_empty(lists, n if wants else 0)
    given = (x, bytes_of(items), numbers, sums, gradient, lists, grid[1], n, tau, LAWS[law])
    if lists:
        long_terms_kernel[grid](*given, False, **tile)
    share = torch.where(proper, 1.0 / valid.clamp_min(1), 0.0)
    loss, numbers[TOTAL.value] = sums.sum(2)
    numbers[RATE.value] = share / tau
    if wants and lists:
        long_terms_kernel[grid](*given, True, **tile)
    return torch.where(proper, loss * share, 0.0), counted, gradient
