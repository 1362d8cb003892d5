"""The cross-entropy of DFTopK's membership, and its closed-form gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import LOWEST_EXPONENT, full_mask
from recsys_topk.ops.dispatch import apply, is_real, operation, sampled, through_reference, wants_graph
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import Array, Bools, add_shared, kth_pair, pair_numpy, scratch
from recsys_topk.ops.selection.logistic import logistic_logs

# The time of batches of at most this many items depends on the number of calls, that of larger ones on the number of
# passes over memory.
SHORT = 4096

# Rows are folded as long as their halves have this many items.
FOLD_FROM = 64


@operation
def dftopk_bce(
    scores: Tensor,
    target: Tensor,
    mask: Tensor | None,
    k: int | Tensor,
    items: Tensor | None,
    counted: Tensor | None,
    tau: float,
    alpha: float,
) -> Tensor:
    """Return the mean over valid items of softplus(z_i) - y_i z_i for each list, (B,).

    z_i = (x_i - theta) / tau, theta = alpha x_[k] + (1 - alpha) x_[k+1], differentiated. O(N).

    Args:
        scores: (B, N); masked places and lists that are not counted may hold anything.
        target: Boolean (B, N), the true top k.
        mask: Boolean (B, N); None = all items are real.
        k: One int, or one int per list, (B,); 1 <= k < number of valid items in lists that are counted.
        items: Number of valid items, (B,); None = all N.
        counted: Boolean (B,); None = all. The value of the other lists has no meaning and no gradient.
        tau: Temperature.
        alpha: Where the threshold lies between x_[k+1] (0) and x_[k] (1).
    """
    valid = full_mask(scores) if mask is None else mask
    x = scores
    if counted is not None:  # lists that do not count are replaced by equal scores
        row = counted[:, None]
        x, target, k = torch.where(row, x, 0.0), target & row, torch.where(counted, k, 1)
        valid = valid if mask is None else valid | ~row
    if mask is not None:
        x = fill_masked(x, valid, 0.0)
    kept, cut = kth_pair(x, k, valid)
    log_p, log_q = logistic_logs((x - (cut + alpha * (kept - cut))) / tau)
    chosen = torch.where(target, log_p, log_q)
    if mask is not None:
        chosen = fill_masked(chosen, valid, 0.0)
    return -chosen.sum(1) / (scores.shape[1] if items is None else items.clamp_min(1))


@dftopk_bce.backend("numpy", lambda scores, target, *rest: is_real(scores) and is_real(target))
def _numpy(scores: Tensor, *rest: Any) -> Tensor:
    fused: Tensor = apply(_FusedBCE, scores, _Task(*rest))
    return fused


class _Task(NamedTuple):
    """The arguments of the fused loss other than the scores; every argument of ``Function.apply`` takes time."""

    target: Tensor
    mask: Tensor | None
    k: int | Tensor
    items: Tensor | None
    counted: Tensor | None
    tau: float
    alpha: float


class _FusedBCE(torch.autograd.Function):
    """The loss of each list and its closed-form gradient, in numpy.

    With s_i = 1 - 2 y_i and t_i = s_i (x_i - theta) / tau the loss of an item is softplus(t_i) and its derivative
    g_i = s_i sigmoid(t_i) / tau, free of cancellation for both targets; the items at x_[k] and x_[k+1] then receive
    -alpha and -(1 - alpha) times the sum of g. Masked scores are -inf here, so all their terms are 0.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, task: _Task) -> Tensor:
        mask, k, tau, alpha = task.mask, task.k, task.tau, task.alpha
        x = scores.detach() if mask is None else fill_masked(scores.detach(), mask, -math.inf)
        a, target = x.numpy(), task.target.numpy()
        ks = k.numpy() if isinstance(k, Tensor) else k
        if task.counted is not None:
            left_out = ~task.counted.numpy()
            a, target = a.copy() if mask is None else a, target.copy()
            a[left_out] = 0.0
            target[left_out] = False
            ks = np.where(left_out, 1, ks)
        kept, cut = pair_numpy(a, ks, reuse=True)
        kept, cut = kept[:, None], cut[:, None]
        items = a.shape[1] if task.items is None else np.maximum(task.items.numpy(), 1).astype(a.dtype)
        ctx.short = a.size <= SHORT
        terms = _short_terms if ctx.short else _long_terms
        with np.errstate(invalid="ignore", over="ignore"):  # scores may be infinite or NaN
            theta = cut + a.dtype.type(alpha) * (kept - cut)
            total, gradient = terms(a, theta, target, tau, ctx.needs_input_grad[0])
        if gradient is not None:
            summed = np.add.reduce(gradient, 1) if ctx.short else torch.from_numpy(gradient).sum(1).numpy()
            add_shared(gradient, a, kept, summed * a.dtype.type(-alpha))
            add_shared(gradient, a, cut, summed * a.dtype.type(alpha - 1.0))
            if ctx.short:
                gradient /= items if isinstance(items, int) else items[:, None]
            ctx.save_for_backward(scores, torch.from_numpy(gradient))
        total /= items
        ctx.items, ctx.task = items, task
        return torch.from_numpy(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        scores, gradient = ctx.saved_tensors
        if wants_graph():
            return through_reference(lambda x: dftopk_bce.reference(x, *ctx.task), [scores], [grad])[0], None
        if not ctx.short:  # the gradient of a short batch is already divided
            grad = grad / (ctx.items if isinstance(ctx.items, int) else torch.from_numpy(ctx.items))
        return gradient * (grad if grad.shape[0] == 1 else grad.unsqueeze(1)), None


def _short_terms(a: Array, theta: Array, target: Bools, tau: float, with_gradient: bool) -> tuple[Array, Array | None]:
    """Return the sum of the item losses of each list, (B,), and s sigmoid(t) / tau, (B, N), with few calls of numpy."""
    sign = (0.5 - target.astype(a.dtype)) * a.dtype.type(2.0 / tau)
    t = (a - theta) * sign
    e = np.exp(-np.abs(t))
    total = np.add.reduce(np.log1p(e) + np.maximum(t, 0), 1)
    return total, sign * np.where(t >= 0, 1, e) / (1 + e) if with_gradient else None


def _long_terms(a: Array, theta: Array, target: Bools, tau: float, with_gradient: bool) -> tuple[Array, Array | None]:
    """Return the same as `_short_terms`, with few passes over memory, in place, in torch."""
    sign, e = (torch.from_numpy(buffer) for buffer in scratch(a, 2))
    np.copyto(sign.numpy(), target)
    sign.mul_(-2.0 / tau).add_(1.0 / tau)
    t = torch.sub(torch.from_numpy(a), torch.from_numpy(theta)).mul_(sign)
    torch.abs(t, out=e).neg_().clamp_min_(LOWEST_EXPONENT[e.dtype]).exp_()
    total = _sum_log1p(e).add_(torch.clamp_min(t, 0.0, out=e).sum(1))
    return total.numpy(), t.sigmoid_().mul_(sign).numpy() if with_gradient else None


def _sum_log1p(e: Tensor) -> Tensor:
    """Return the sum of log(1 + e) over each row of e >= 0, (B,), destroying `e`.

    (1 + a)(1 + b) = 1 + (a + b + a b): long rows are folded three times before the logarithm, which thus runs on an
    eighth of the items. All terms are non-negative, so nothing cancels and tiny values keep their precision.
    """
    rest = torch.zeros(e.shape[0], dtype=e.dtype)
    for _ in range(3):
        half = e.shape[1] // 2
        if half < FOLD_FROM:
            break
        if e.shape[1] % 2:
            rest += torch.log1p(e[:, -1])
        left, right = e[:, :half], e[:, half : 2 * half]
        torch.addcmul(right, left, right, out=right)
        e = left.add_(right)
    return rest.add_(e.log1p_().sum(1))


@sampled(dftopk_bce)
def _samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for lists, n, dtype in ((4, 12, torch.float32), (4, 12, torch.float64), (30, 300, torch.float32)):
        x = torch.randn(lists, n, generator=generator, dtype=dtype)
        x[1] = x[1].round()
        target = torch.rand(lists, n, generator=generator) > 0.7
        mask = torch.rand(lists, n, generator=generator) > 0.3
        mask[:, :3] = True
        junk = x.masked_fill(~mask, math.nan)
        ks = torch.randint(1, 3, (lists,), generator=generator)
        counted = torch.arange(lists) != 2
        for alpha in (0.5, 0.2):
            yield x.clone().requires_grad_(), target, None, 2, None, None, 0.7, alpha
            yield x.clone().requires_grad_(), target, None, ks, None, counted, 0.7, alpha
            yield junk.clone().requires_grad_(), target & mask, mask, ks, mask.sum(1), None, 2.0, alpha
            yield junk.clone().requires_grad_(), target & mask, mask, 2, mask.sum(1), counted, 2.0, alpha
