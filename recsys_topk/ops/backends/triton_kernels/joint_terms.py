"""The joint objective on a GPU: the terms of all stages, the survival and all gradients of a list in one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_topk.ops.backends.triton_kernels.launch import LARGEST_INT, registered, value_and_gradient
from recsys_topk.ops.backends.triton_kernels.rows import (
    CLIP,
    LAPLACE,
    LAWS,
    bytes_of,
    item_terms,
    kth_pair,
    log1p_unit,
    tails,
    tiling,
    true_items,
)
from recsys_topk.ops.dispatch import through_reference, wants_graph
from recsys_topk.ops.losses.joint_terms import JointTask, joint_losses, mean_terms
from recsys_topk.ops.selection.membership import Law


@triton.jit
def one_stage_more(u, survived, failed, LAW: tl.constexpr):  # noqa: N803
    """Return log prod_m p_m and log(1 - prod_m p_m) after one more stage; `survived` and `failed` are those before."""
    log_p, log_q, _, _ = tails(u, LAW)
    if LAW == CLIP:  # p is 1 in a stage that all items survive, and not clamped
        log_p, log_q = tl.where(u < 1e38, log_p, 0.0), tl.where(u < 1e38, log_q, -1e38)
    fails = tl.maximum(log_q, -1e38) + survived
    more, less = tl.maximum(failed, fails), tl.minimum(failed, fails)
    return survived + log_p, more + log1p_unit(tl.exp(less - more))


@triton.jit
def loss_of_surviving(survived, failed):
    """Return -log(1 - prod_m p_m), the loss of an item that is not true."""
    likely = survived > -0.6931472  # then q < 1/2
    return tl.where(likely, -failed, -tl.log(1.0 - tl.exp(tl.where(likely, -1.0, survived))))


@triton.jit
def slope_of_surviving(u, true, survived, failed, LAW: tl.constexpr):  # noqa: N803
    """Return the derivative of the survival loss with respect to u of a stage; 0 for u = 3e38 (all items survive)."""
    log_p, log_q, rise, _ = tails(u, LAW)
    if LAW == CLIP:  # p is at least 1e-6 in every stage, so nothing overflows
        d = tl.where(true, -1.0, tl.exp(survived - failed)) * rise
    else:
        log_rise = log_q
        if LAW == LAPLACE:
            log_rise = tl.where(u > 0.0, log_q - log_p, 0.0)
        d = tl.where(true, -rise, tl.exp(tl.minimum(survived - failed + log_rise, 0.0)))
    return tl.where(u < 1e38, d, 0.0)


@triton.jit(do_not_specialize=["lists", "k"])
def joint_terms_kernel(
    x_ptr, y_ptr, mask_ptr, cuts_ptr, loss_ptr, counted_ptr, own_ptr, joint_ptr, moves_ptr, lists, n, k, above, tau,
    alpha, LAW: tl.constexpr, STAGES: tl.constexpr, HAS_MASK: tl.constexpr, HAS_CUTS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the stage losses and survival losses of ROWS lists, which lists count, and the gradients.

    The survival loss of a true item is -sum_m log p_m. That of any other item is -log q, q = 1 - prod_m p_m, with the
    derivative prod_m p_m / q d log p_m / du_m. q is the sum of q_m prod_{l<m} p_l, accumulated in logarithms.

    Args:
        x_ptr: Scores, (STAGES, lists, n).
        y_ptr: Labels, (lists, n).
        mask_ptr: Bytes, (lists, n); read if HAS_MASK.
        cuts_ptr: How many items each stage passes on, (STAGES,) int64; read if HAS_CUTS, else it is k.
        loss_ptr: (STAGES + 1, lists) float32, written.
        counted_ptr: (STAGES + 1, lists) bytes, written.
        own_ptr: (STAGES, lists, n) float32, written: the gradient of the loss of a stage.
        joint_ptr: (STAGES, lists, n) float32, written: the gradient of the survival loss.
        moves_ptr: (STAGES, lists, n) float32, overwritten.
        lists: Number of lists.
        n: Number of items of a list.
        k: How many items are wanted; -1 = each list's number of positives.
        above: Items with a label above this are positive.
        tau: Temperature.
        alpha: Position of the threshold of the DFTOPK law.
        LAW: DFTOPK, LOGISTIC, LAPLACE or CLIP.
        STAGES: Number of stages.
        HAS_MASK: Whether there is a mask.
        HAS_CUTS: Whether each stage has its own quota.
        ROWS: Number of lists of a program.
        BLOCK: A power of 2, at least n.
    """
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < lists)[:, None] & (at < n)[None, :]
    place = row.to(tl.int64)[:, None] * n + at[None, :]
    stride = lists.to(tl.int64) * n
    real = inside
    if HAS_MASK:
        real = inside & (tl.load(mask_ptr + place, mask=inside, other=0) != 0)
    y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    positive = real & (y > above)
    positives, valid = tl.sum(positive.to(tl.int32), axis=1), tl.sum(real.to(tl.int32), axis=1)
    wanted = tl.minimum(tl.where(k < 0, positives, k), valid)
    counted = (positives > 0) & (wanted > 0) & (wanted < valid)
    true = true_items(y, positive, positives, wanted, ROWS)
    share = 1.0 / tl.maximum(valid, 1).to(tl.float32)
    rate = (share / tau)[:, None]
    joint, anywhere = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.int32)
    survived, failed = tl.zeros([ROWS, BLOCK], tl.float32), tl.full([ROWS, BLOCK], -1e38, tl.float32)
    for stage in range(STAGES):
        there = stage * stride + place
        x = tl.where(real, tl.load(x_ptr + there, mask=inside, other=0.0).to(tl.float32), float("-inf"))
        cut_at = wanted
        if HAS_CUTS:
            cut_at = tl.minimum(tl.zeros_like(valid) + tl.load(cuts_ptr + stage).to(tl.int32), valid)
        here = counted & (cut_at < valid)
        kept, cut = kth_pair(x, real, cut_at, ROWS)
        u, item, d, w = item_terms(x, real, true, kept, cut, cut_at, tau, alpha, LAW)
        tl.store(loss_ptr + stage * lists + row, tl.where(here, tl.sum(item, axis=1) * share, 0.0), mask=row < lists)
        tl.store(counted_ptr + stage * lists + row, here.to(tl.uint8), mask=row < lists)
        joint += tl.where(here, tl.sum(tl.where(true, item, 0.0), axis=1), 0.0)
        anywhere |= here.to(tl.int32)
        moved = (d - w * tl.sum(d, axis=1)[:, None]) * rate
        tl.store(own_ptr + there, tl.where(here[:, None] & real, moved, 0.0), mask=inside)
        # For the second pass. All items survive a stage in which the list does not count.
        u = tl.where(here[:, None] & real, tl.minimum(u, 1e37), 3e38)
        tl.store(joint_ptr + there, u, mask=inside)
        tl.store(moves_ptr + there, tl.where(here[:, None], w, 0.0), mask=inside)
        survived, failed = one_stage_more(u, survived, failed, LAW)
    joint += tl.sum(tl.where(real & (true == 0), loss_of_surviving(survived, failed), 0.0), axis=1)
    some = anywhere > 0
    tl.store(loss_ptr + STAGES * lists + row, tl.where(some, joint * share, 0.0), mask=row < lists)
    tl.store(counted_ptr + STAGES * lists + row, some.to(tl.uint8), mask=row < lists)
    tl.debug_barrier()  # the next loads read what other threads have stored
    for stage in range(STAGES):
        there = stage * stride + place
        u = tl.load(joint_ptr + there, mask=inside, other=3e38)
        w = tl.load(moves_ptr + there, mask=inside, other=0.0)
        d = slope_of_surviving(u, true, survived, failed, LAW)
        moved = (d - w * tl.sum(d, axis=1)[:, None]) * rate
        tl.store(joint_ptr + there, moved, mask=inside)


def fused_joint_terms(
    scores: Tensor, labels: Tensor, mask: Tensor | None, cuts: list[int], k: int, above: float, law: str,
    tau: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return losses and which lists count, (M + 1, B), and the gradients of stages and survival, (M, B, N)."""
    stages, lists, n = scores.shape
    losses, counted, own, joint = _fake(scores)
    x, y, tile = scores.contiguous(), labels.contiguous(), tiling(n)
    at = torch.empty(len(cuts), dtype=torch.int64, device=x.device)
    for stage, cut in enumerate(cuts):  # with kernels, because a copy from the host would synchronise
        at[stage].fill_(cut)
    if lists:
        joint_terms_kernel[(triton.cdiv(lists, tile["ROWS"]),)](
            x, y, x if mask is None else bytes_of(mask), at if cuts else x, losses, bytes_of(counted), own, joint,
            torch.empty_like(own), lists, n, min(k, LARGEST_INT), above, tau, alpha, LAWS[law], stages,
            mask is not None, bool(cuts), **tile,
        )  # fmt: skip
    return losses, counted, own, joint


def _fake(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stages, lists, n = scores.shape
    losses = scores.new_empty(stages + 1, lists, dtype=torch.float32)
    own = scores.new_empty(stages, lists, n, dtype=torch.float32)
    return losses, torch.empty_like(losses, dtype=torch.bool), own, torch.empty_like(own)


def _reference(x: Tensor, labels: Tensor, mask: Tensor | None, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    cuts, k, above, law, tau, alpha = rest
    task = JointTask(labels.to(x.dtype), mask, None if k < 0 else k, tuple(cuts) or None, above, Law(law, tau, alpha))
    return joint_losses(x.unbind(), task)


def _on_cpu(scores: Tensor, labels: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def parts(x: Tensor, chosen: slice) -> tuple[Tensor, Tensor, Tensor]:
        losses, counted = _reference(x, labels, mask, rest)
        return losses[chosen], losses, counted

    (_, losses, counted), own = value_and_gradient(lambda x: parts(x, slice(-1)), scores)
    _, joint = value_and_gradient(lambda x: parts(x, slice(-1, None)), scores)
    return losses, counted, own, joint


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, labels, mask, *ctx.rest = inputs
    ctx.save_for_backward(scores, output[2], output[3], labels, mask)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scores, own, joint, labels, mask = ctx.saved_tensors
    if wants_graph():
        found = through_reference(lambda x: _reference(x.float(), labels, mask, ctx.rest)[0], [scores], [grad])[0]
    else:
        found = (own * grad[:-1, :, None] + joint * grad[-1, None, :, None]).to(scores.dtype)
    return found, *[None] * 8


fused = registered(fused_joint_terms, _fake, _on_cpu, _setup, _backward)


def joint_terms_triton(scores: Sequence[Tensor], task: JointTask) -> tuple[Tensor, Tensor]:
    """Return the result of `recsys_topk.ops.losses.joint_terms.joint_terms`."""
    labels, mask, k, quotas, above, law, _ = task
    assert law is not None
    stacked, one = torch.stack(list(scores)), -1 if k is None else k
    losses, counted, _, _ = fused(stacked, labels, mask, list(quotas or ()), one, above, law.name, law.tau, law.alpha)
    return mean_terms(losses, counted)
