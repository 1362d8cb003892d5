"""The logistic loss over weighted pairs of a list on a GPU, in blocks. Nothing of size N^2 is stored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_topk.ops.backends.triton_kernels.launch import LARGEST_INT, registered, value_and_gradient
from recsys_topk.ops.backends.triton_kernels.rows import LOG_2, OPTIONS, log1p_unit
from recsys_topk.ops.dispatch import through_reference, wants_graph
from recsys_topk.ops.losses.pair_sums import PairWeights, pair_sums

KINDS = {"ones": 0, "differences": 1, "rows": 2}
ONES, DIFFERENCES, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Numbers of items i and j whose pairs are computed at once.
BLOCK_I, BLOCK_J = 32, 64


@triton.jit
def gain_of(first, second, KIND: tl.constexpr):  # noqa: N803
    """Return g_ij of `recsys_topk.ops.losses.pair_sums.PairWeights`."""
    if KIND == ONES:
        gain = tl.where(first > second, 1.0, 0.0)
    elif KIND == DIFFERENCES:
        gain = tl.maximum(first - second, 0.0)
    else:
        gain = tl.where(second < float("inf"), first, 0.0)
    return gain


@triton.jit
def distance_weight(a, b, k, HAS_K: tl.constexpr):  # noqa: N803
    """Return delta of two ranks, as in `recsys_topk.ops.losses.pair_sums.distance_weight`, without its cancellation.

    D(d) - D(d + 1) = log 2 log(1 + 1 / (1 + d)) / (log(1 + d) log(2 + d)).
    """
    distance = tl.maximum(tl.abs(a - b), 0.5)
    near = tl.log(1.0 + distance)
    delta = LOG_2 * log1p_unit(1.0 / (1.0 + distance)) / (near * tl.log(2.0 + distance))
    if HAS_K:
        worse = tl.maximum(a, b)
        kept = 1.0 - LOG_2 / tl.log(1.0 + tl.maximum(worse, 1.5))
        delta = tl.where(worse > k, delta / kept, delta)
    return delta


@triton.jit(do_not_specialize=["k"])
def pair_sums_kernel(
    x_ptr, first_ptr, second_ptr, discounts_ptr, ranks_ptr, items_ptr, ks_ptr, loss_ptr, gradient_ptr, n, k, mu, sigma,
    KIND: tl.constexpr, HAS_DISCOUNTS: tl.constexpr, HAS_RANKS: tl.constexpr, HAS_K: tl.constexpr,  # noqa: N803
    HAS_KS: tl.constexpr, HAS_ITEMS: tl.constexpr, WANTS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the losses of the pairs (i, j), and the derivatives with respect to x_i, for BLOCK_I items i of a list.

    An item is the first of some pairs and the second of others. A program computes both, so no two programs write to
    the same place, and the sums do not depend on the order of the programs.

    Args:
        x_ptr: Scores, (lists, n).
        first_ptr: Values of the items as the first of a pair, (lists, n) float32.
        second_ptr: Values of the items as the second of a pair, (lists, n) float32.
        discounts_ptr: (lists, n) float32; read if HAS_DISCOUNTS.
        ranks_ptr: (lists, n) float32; read if HAS_RANKS.
        items_ptr: Weights of the items, (lists, n) float32; read if HAS_ITEMS.
        ks_ptr: One k per list; read if HAS_KS.
        loss_ptr: (lists, programs of a list) float32, written.
        gradient_ptr: (lists, n) float32, written if WANTS.
        n: Number of items of a list.
        k: The k of all lists; read if HAS_K and not HAS_KS.
        mu: Weight of delta.
        sigma: Steepness.
        KIND: A value of `KINDS`.
        HAS_DISCOUNTS: Whether there are discounts.
        HAS_RANKS: Whether there are ranks.
        HAS_K: Whether delta has a k.
        HAS_KS: Whether each list has its own k.
        HAS_ITEMS: Whether the items have weights.
        WANTS: Whether to write the gradient.
        BLOCK_I: Number of items i of a program.
        BLOCK_J: Number of items j at once.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    start = row.to(tl.int64) * n
    i = part * BLOCK_I + tl.arange(0, BLOCK_I)
    blank = 0.0 if KIND == WHOLE else float("-inf")
    x_i = tl.load(x_ptr + start + i, mask=i < n, other=0.0).to(tl.float32)[:, None]
    first_i = tl.load(first_ptr + start + i, mask=i < n, other=blank)[:, None]
    second_i = tl.load(second_ptr + start + i, mask=i < n, other=float("inf"))[:, None]
    cut = tl.load(ks_ptr + row).to(tl.float32) if HAS_KS else k.to(tl.float32)
    loss, pull = tl.zeros([BLOCK_I], tl.float32), tl.zeros([BLOCK_I], tl.float32)
    for begin in range(0, n, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        x_j = tl.load(x_ptr + start + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
        second_j = tl.load(second_ptr + start + j, mask=j < n, other=float("inf"))[None, :]
        place = tl.full([BLOCK_I, BLOCK_J], 0.0, tl.float32)
        if HAS_DISCOUNTS:
            d_i = tl.load(discounts_ptr + start + i, mask=i < n, other=0.0)[:, None]
            d_j = tl.load(discounts_ptr + start + j, mask=j < n, other=0.0)[None, :]
            place += tl.abs(d_i - d_j)
        if HAS_RANKS:
            r_i = tl.load(ranks_ptr + start + i, mask=i < n, other=1.0)[:, None]
            r_j = tl.load(ranks_ptr + start + j, mask=j < n, other=1.0)[None, :]
            place += mu * distance_weight(r_i, r_j, cut, HAS_K)
        if (not HAS_DISCOUNTS) and (not HAS_RANKS):
            place += 1.0
        if HAS_ITEMS:
            v_i = tl.load(items_ptr + start + i, mask=i < n, other=0.0)[:, None]
            place *= v_i * tl.load(items_ptr + start + j, mask=j < n, other=0.0)[None, :]
        t = sigma * (x_j - x_i)
        e = tl.exp(-tl.abs(t))
        inverse = 1.0 / (1.0 + e)
        better = gain_of(first_i, second_j, KIND) * place
        loss += tl.sum(better * (tl.maximum(t, 0.0) + log1p_unit(e)), axis=1)
        if WANTS:
            first_j = tl.load(first_ptr + start + j, mask=j < n, other=blank)[None, :]
            worse = gain_of(first_j, second_i, KIND) * place
            up = t >= 0.0
            pull += tl.sum((worse * tl.where(up, e, 1.0) - better * tl.where(up, 1.0, e)) * inverse, axis=1)
    tl.store(loss_ptr + row * tl.num_programs(1) + part, tl.sum(loss, axis=0))
    if WANTS:
        tl.store(gradient_ptr + start + i, sigma * pull, mask=i < n)


def fused_pair_sums(
    scores: Tensor, first: Tensor, second: Tensor, discounts: Tensor | None, ranks: Tensor | None, items: Tensor | None,
    ks: Tensor | None, k: int, mu: float, kind: str, sigma: float, wants: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the sums, (B,), and the gradient, (B, N), or (B, 0) if it is not wanted; k = -1 means no k."""
    lists, n = scores.shape
    _, gradient = _fake(scores, wants)
    parts = triton.cdiv(n, BLOCK_I)
    losses = scores.new_empty(lists, parts, dtype=torch.float32)
    x = scores.contiguous()
    given = [x if one is None else one.contiguous() for one in (first, second, discounts, ranks, items, ks)]
    if lists and n:
        pair_sums_kernel[(lists, parts)](
            x, *given, losses, gradient, n, min(k, LARGEST_INT), mu, sigma, KINDS[kind], discounts is not None,
            ranks is not None, ks is not None or k >= 0, ks is not None, items is not None, wants, BLOCK_I,
            BLOCK_J, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return losses.sum(1), gradient


def _fake(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lists, n = scores.shape
    losses = scores.new_empty(lists, dtype=torch.float32)
    return losses, scores.new_empty(lists, n if rest[-1] else 0, dtype=torch.float32)


def _reference(x: Tensor, tensors: Any, rest: Any) -> Tensor:
    first, second, discounts, ranks, items, ks = tensors
    k, mu, kind, sigma, _ = rest
    own = ks if ks is not None else None if k < 0 else k
    return pair_sums.reference(x, PairWeights(first, second, kind, discounts, ranks, mu, own, items), sigma)


def _on_cpu(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    (losses,), gradient = value_and_gradient(lambda x: (_reference(x, rest[:6], rest[6:]),), scores)
    return losses, gradient if rest[-1] else gradient[:, :0].contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rest = inputs[7:]
    ctx.save_for_backward(inputs[0], output[1], *inputs[1:7])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scores, gradient, *tensors = ctx.saved_tensors
    if wants_graph():
        found = through_reference(lambda x: _reference(x.float(), tensors, ctx.rest), [scores], [grad])[0]
    else:
        found = (gradient * grad[:, None]).to(scores.dtype)
    return found, *[None] * 11


fused = registered(fused_pair_sums, _fake, _on_cpu, _setup, _backward)


def pair_sums_triton(scores: Tensor, weights: PairWeights, sigma: float) -> Tensor:
    """Return the result of `recsys_topk.ops.losses.pair_sums.pair_sums`."""
    given = [None if one is None else one.detach().float() for one in weights.tensors()]
    ks, k = (weights.k, 0) if isinstance(weights.k, Tensor) else (None, -1 if weights.k is None else weights.k)
    wants = scores.requires_grad and torch.is_grad_enabled()
    losses: Tensor = fused(scores, *given, ks, k, weights.mu, weights.kind, sigma, wants)[0]
    return losses
