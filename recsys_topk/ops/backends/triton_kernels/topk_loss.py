"""The losses of soft top-k memberships on a GPU: threshold, loss and gradient of a list in one program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_topk.ops.backends.triton_kernels.launch import LARGEST_INT, registered, value_and_gradient
from recsys_topk.ops.backends.triton_kernels.rows import (
    FENCHEL_YOUNG,
    LAWS,
    bytes_of,
    item_terms,
    kth_pair,
    tiling,
    true_items,
)
from recsys_topk.ops.dispatch import through_reference, wants_graph
from recsys_topk.ops.losses.topk_loss import topk_loss
from recsys_topk.ops.selection.membership import Law
from recsys_topk.processes import divisor


@triton.jit(do_not_specialize=["lists", "k"])
def topk_loss_kernel(
    x_ptr, y_ptr, mask_ptr, ks_ptr, loss_ptr, counted_ptr, gradient_ptr, lists, n, k, above, tau, alpha,
    LAW: tl.constexpr, HAS_MASK: tl.constexpr, HAS_KS: tl.constexpr, WANTS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the loss of each of ROWS lists, whether it counts, and its gradient.

    Args:
        x_ptr: Scores, (lists, n).
        y_ptr: Labels, (lists, n).
        mask_ptr: Bytes, (lists, n); read if HAS_MASK.
        ks_ptr: One k per list, int64; read if HAS_KS.
        loss_ptr: (lists,) float32, written.
        counted_ptr: (lists,) bytes, written.
        gradient_ptr: (lists, n) float32, written if WANTS.
        lists: Number of lists.
        n: Number of items of a list.
        k: The k of all lists; -1 = each list's number of positives.
        above: Items with a label above this are positive.
        tau: Temperature.
        alpha: Position of the threshold of the DFTOPK law.
        LAW: A value of `LAWS`.
        HAS_MASK: Whether there is a mask.
        HAS_KS: Whether each list has its own k.
        WANTS: Whether to write the gradient.
        ROWS: Number of lists of a program.
        BLOCK: A power of 2, at least n.
    """
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < lists)[:, None] & (at < n)[None, :]
    place = row.to(tl.int64)[:, None] * n + at[None, :]
    real = inside
    if HAS_MASK:
        real = inside & (tl.load(mask_ptr + place, mask=inside, other=0) != 0)
    x = tl.where(real, tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32), float("-inf"))
    y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    positive = real & (y > above)
    positives, valid = tl.sum(positive.to(tl.int32), axis=1), tl.sum(real.to(tl.int32), axis=1)
    if HAS_KS:
        wanted = tl.minimum(tl.load(ks_ptr + row, mask=row < lists, other=0), n).to(tl.int32)
    else:
        wanted = tl.where(k < 0, positives, k)
    rank = tl.minimum(wanted, valid)
    counted = (positives > 0) & (rank > 0) & (rank < valid)
    true = true_items(y, positive, positives, rank, ROWS)
    proper = counted
    if LAW == FENCHEL_YOUNG:
        rank = tl.sum(true.to(tl.int32), axis=1)
        proper = counted & (rank < valid)  # tied labels may make every item true
    kept, cut = kth_pair(x, real, rank, ROWS)
    _, item, d, w = item_terms(x, real, true, kept, cut, rank, tau, alpha, LAW)
    share = 1.0 / tl.maximum(valid, 1).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(proper, tl.sum(item, axis=1) * share, 0.0), mask=row < lists)
    tl.store(counted_ptr + row, counted.to(tl.uint8), mask=row < lists)
    if WANTS:
        moved = (d - w * tl.sum(d, axis=1)[:, None]) * (share / tau)[:, None]
        tl.store(gradient_ptr + place, tl.where(proper[:, None], moved, 0.0), mask=inside)


def fused_topk_loss(
    scores: Tensor, labels: Tensor, mask: Tensor | None, ks: Tensor | None, k: int, above: float, law: str, tau: float,
    alpha: float, wants: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the losses, (B,), which lists count, (B,), and the gradient, (B, N), or (B, 0) if it is not wanted."""
    lists, n = scores.shape
    loss, counted, gradient = _fake(scores, wants)
    x, tile = scores.contiguous(), tiling(n)
    if lists:
        topk_loss_kernel[(triton.cdiv(lists, tile["ROWS"]),)](
            x, labels.contiguous(), x if mask is None else bytes_of(mask), x if ks is None else ks.long().contiguous(),
            loss, bytes_of(counted), gradient, lists, n, min(k, LARGEST_INT), above, tau, alpha, LAWS[law],
            mask is not None, ks is not None, wants, **tile,
        )  # fmt: skip
    return loss, counted, gradient


def _fake(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lists, n = scores.shape
    loss = scores.new_empty(lists, dtype=torch.float32)
    gradient = scores.new_empty(lists, n if rest[-1] else 0, dtype=torch.float32)
    return loss, torch.empty_like(loss, dtype=torch.bool), gradient


def _reference(x: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    labels, mask, ks, k, above, law, tau, alpha, _ = rest
    own = (None if k < 0 else k) if ks is None else ks
    values, counted = topk_loss.reference(x, labels.to(x.dtype), mask, own, above, Law(law, tau, alpha), False)
    return values, torch.ones_like(values, dtype=torch.bool) if counted is None else counted


def _on_cpu(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (values, counted), gradient = value_and_gradient(lambda x: _reference(x, rest), scores)
    return values, counted, gradient if rest[-1] else gradient[:, :0].contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, labels, mask, ks, *ctx.rest = inputs
    ctx.save_for_backward(scores, output[2], labels, mask, ks)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scores, gradient, *tensors = ctx.saved_tensors
    if wants_graph():
        rest = (*tensors, *ctx.rest)
        found = through_reference(lambda x: _reference(x.float(), rest)[0], [scores], [grad])[0]
    else:
        found = (gradient * grad[:, None]).to(scores.dtype)
    return found, *[None] * 9


fused = registered(fused_topk_loss, _fake, _on_cpu, _setup, _backward)


def topk_loss_triton(
    scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | Tensor | None, above: float, law: Law, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the result of `recsys_topk.ops.losses.topk_loss.topk_loss`."""
    ks, one = (k, 0) if isinstance(k, Tensor) else (None, -1 if k is None else k)
    wants = scores.requires_grad and torch.is_grad_enabled()
    losses, counted, _ = fused(scores, labels, mask, ks, one, above, law.name, law.tau, law.alpha, wants)
    return losses.sum() / divisor(counted.sum(), losses.dtype) if mean else losses, counted
