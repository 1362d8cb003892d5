"""The joint objective of lists that are too long for one program, which are split into tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_topk.ops.backends.triton_kernels.long_lists import (
    AT,
    CUT,
    NUMBERS,
    RATE,
    TOTAL,
    depth_of,
    filled,
    grid_of,
    long_lists,
    moves_of,
    numbers_of,
    tile_of,
)
from recsys_topk.ops.backends.triton_kernels.rows import LAWS, bytes_of, law_terms
from recsys_topk.ops.backends.triton_kernels.survival import loss_of_surviving, one_stage_more, slope_of_surviving

# Number of items per stage that one program holds.
LONGEST = 4096

# A number of a list in a stage, after those of `long_lists`: the sum of the derivatives of the survival loss.
JOINT_TOTAL = tl.constexpr(NUMBERS)
STAGE_NUMBERS = tl.constexpr(NUMBERS + 1)


@triton.jit
def stage_at(x_ptr, place, inside, numbers_ptr, lists, real, tau):
    """Return the scores of a tile in a stage, u, and u with 3e38 in lists that do not count in the stage."""
    x = tl.load(x_ptr + place, mask=inside, other=float("-inf"))
    u = (x - tl.load(numbers_ptr + CUT * lists)[:, None]) / tau - tl.load(numbers_ptr + AT * lists)[:, None]
    here = tl.load(numbers_ptr + RATE * lists) > 0.0
    return x, u, tl.where(here[:, None] & real, tl.minimum(u, 1e37), 3e38)


@triton.jit(do_not_specialize=["lists", "tiles"])
def long_joint_kernel(
    x_ptr, items_ptr, numbers_ptr, sums_ptr, own_ptr, joint_ptr, lists, tiles, n, tau, LAW: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the sums of a tile's losses and of their derivatives or, with WRITES, the gradients.

    Args:
        x_ptr: Scores, (STAGES, lists, n) float32, -inf where masked.
        items_ptr: (lists, n) bytes: 0 = masked, 1 = valid, 2 = true.
        numbers_ptr: Numbers of the lists, (STAGES, STAGE_NUMBERS, lists) float32.
        sums_ptr: (3 STAGES + 1, lists, tiles) float32, written unless WRITES: per stage the sums of the losses, of
            their derivatives and of the derivatives of the survival loss; then the sums of the survival loss.
        own_ptr: (STAGES, lists, n) float32, written if WRITES: the gradient of the loss of a stage.
        joint_ptr: (STAGES, lists, n) float32, written if WRITES: the gradient of the survival loss.
        lists: Number of lists.
        tiles: Number of tiles of a list.
        n: Number of items of a list.
        tau: Temperature.
        LAW: DFTOPK, LOGISTIC, LAPLACE or CLIP.
        STAGES: Number of stages.
        WRITES: Whether to write the gradients; the sums must be known.
        BLOCK: Number of items of a tile.
    """
    row = tl.program_id(0) + tl.arange(0, 1)
    place, inside = tile_of(row, n, BLOCK)
    kind = tl.load(items_ptr + place, mask=inside, other=0)
    real, true = kind > 0, kind > 1
    stride = lists.to(tl.int64) * n
    out, step = sums_ptr + row.to(tl.int64) * tiles + tl.program_id(1), lists.to(tl.int64) * tiles
    joint = tl.zeros([1], tl.float32)
    survived, failed = tl.zeros([1, BLOCK], tl.float32), tl.full([1, BLOCK], -1e38, tl.float32)
    for stage in range(STAGES):
        numbers = numbers_ptr + stage * STAGE_NUMBERS * lists + row
        x, u, open_u = stage_at(x_ptr + stage * stride, place, inside, numbers, lists, real, tau)
        survived, failed = one_stage_more(open_u, survived, failed, LAW)
        item, d = law_terms(u, real, true, tau, LAW)
        rate = tl.load(numbers + RATE * lists)
        if WRITES:
            w = moves_of(x, u, real, numbers, lists, LAW)
            moved = (d - w * tl.load(numbers + TOTAL * lists)[:, None]) * rate[:, None]
            tl.store(own_ptr + stage * stride + place, tl.where(rate[:, None] > 0.0, moved, 0.0), mask=inside)
        else:
            tl.store(out + 3 * stage * step, tl.sum(item, axis=1))
            tl.store(out + (3 * stage + 1) * step, tl.sum(d, axis=1))
            joint += tl.where(rate > 0.0, tl.sum(tl.where(true, item, 0.0), axis=1), 0.0)
    for stage in range(STAGES):
        numbers = numbers_ptr + stage * STAGE_NUMBERS * lists + row
        x, u, open_u = stage_at(x_ptr + stage * stride, place, inside, numbers, lists, real, tau)
        d = slope_of_surviving(open_u, true, survived, failed, LAW)
        if WRITES:
            w = moves_of(x, u, real, numbers, lists, LAW)
            rate = tl.load(numbers + RATE * lists)
            moved = (d - w * tl.load(numbers + JOINT_TOTAL * lists)[:, None]) * rate[:, None]
            tl.store(joint_ptr + stage * stride + place, tl.where(rate[:, None] > 0.0, moved, 0.0), mask=inside)
        else:
            tl.store(out + (3 * stage + 2) * step, tl.sum(d, axis=1))
    if WRITES == 0:
        joint += tl.sum(tl.where(real & (true == 0), loss_of_surviving(survived, failed), 0.0), axis=1)
        tl.store(out + 3 * STAGES * step, joint)


def long_joint_terms(
    scores: Tensor, labels: Tensor, mask: Tensor | None, cuts: list[int], k: int, above: float, law: str,
    tau: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result of `recsys_topk.ops.backends.triton_kernels.joint_terms.fused_joint_terms`."""
    stages, lists, n = scores.shape
    _, items, rank, valid, counted = long_lists(scores[0], labels, mask, None, k, above)
    real, share = items > 0, 1.0 / valid.clamp_min(1)
    x, numbers, where = [], [], []
    for stage, one in enumerate(scores):
        cut = rank if not cuts else torch.full_like(rank, cuts[stage])
        here = counted & (cut < valid)
        at = torch.where(here, cut, 1)
        depth = depth_of(n, cuts[stage] if cuts else None if k < 0 else k)
        x.append(filled(one, real, here))
        found = numbers_of(x[-1], at, depth, tau, alpha, law)
        found[RATE.value] = torch.where(here, share / tau, 0.0)
        numbers.append(torch.cat([found, torch.zeros_like(found[:1])]))
        where.append(here)
    anywhere = torch.stack(where).any(0)
    stacked, known = torch.stack(x), torch.stack(numbers)
    grid, tile = grid_of(lists, n)
    sums, own = known.new_empty(3 * stages + 1, *grid), known.new_empty(stages, lists, n)
    joint = torch.empty_like(own)
    given = (stacked, bytes_of(items), known, sums, own, joint, lists, grid[1], n, tau, LAWS[law], stages)
    if lists:
        long_joint_kernel[grid](*given, False, **tile)
    totals = sums.sum(2)
    known[:, TOTAL.value], known[:, JOINT_TOTAL.value] = totals[1:-1:3], totals[2:-1:3]
    if lists:
        long_joint_kernel[grid](*given, True, **tile)
    count = torch.stack([*where, anywhere])
    return torch.where(count, torch.cat([totals[:-1:3], totals[-1:]]) * share, 0.0), count, own, joint
