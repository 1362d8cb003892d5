"""The cross-entropy of DFTopK's membership, and its closed-form gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import LOWEST_EXPONENT
from recsys_topk.ops.dispatch import apply, through_reference, wants_graph
from recsys_topk.ops.losses.topk_loss import counted_lists, topk_loss
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import Array, Bools, add_shared, pair_numpy, scratch
from recsys_topk.processes import divisor

# The time of batches of at most this many items depends on the number of calls, that of larger ones on the number of
# passes over memory.
SHORT = 4096

# Rows are folded as long as their halves have this many items.
FOLD_FROM = 64


class _Task(NamedTuple):
    """The arguments of `topk_loss` after the scores, and what follows from the labels.

    Attributes:
        arguments: Labels, mask, k, above, law and mean.
        target: Boolean (B, N), the true top k.
        k: (B,), 1 <= k < number of valid items.
        items: (B,), the number of valid items.
        left_out: Boolean (B,), the lists that do not count; None = all count.
    """

    arguments: tuple[Any, ...]
    target: Tensor
    k: Tensor
    items: Tensor
    left_out: Bools | None


def dftopk_bce(scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Return `topk_loss` of the law ``"dftopk"``, in numpy."""
    labels, mask, k, above, _, mean = arguments
    lists = counted_lists(labels, mask, k, above, None)
    counted, ks, whole = lists.counted, lists.wanted, bool(lists.counted.all())
    if not whole:
        ks = torch.where(counted, ks, 1)
    task = _Task(arguments, lists.target, ks, lists.items, None if whole else ~counted.numpy())
    losses: Tensor = apply(_FusedBCE, scores, task)
    if not whole:
        losses = torch.where(counted, losses, 0.0)
    if mean:
        losses = losses.sum() / divisor(counted.sum(), losses.dtype)
    return losses, None if whole else counted


class _FusedBCE(torch.autograd.Function):
    """The loss of each list and its closed-form gradient, in numpy.

    With s_i = 1 - 2 y_i and t_i = s_i (x_i - theta) / tau the loss of an item is softplus(t_i) and its derivative
    g_i = s_i sigmoid(t_i) / tau, free of cancellation for both targets; the items at x_[k] and x_[k+1] then receive
    -alpha and -(1 - alpha) times the sum of g. Masked scores are -inf here, so all their terms are 0.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, task: _Task) -> Tensor:
        mask, law = task.arguments[1], task.arguments[4]
        tau, alpha = law.tau, law.alpha
        x = scores.detach() if mask is None else fill_masked(scores.detach(), mask, -math.inf)
        a, target = x.numpy(), task.target.numpy()
        if task.left_out is not None:  # lists that do not count are replaced by equal scores
            a, target = a.copy() if mask is None else a, target.copy()
            a[task.left_out] = 0.0
            target[task.left_out] = False
        kept, cut = pair_numpy(a, task.k.numpy(), reuse=True)
        kept, cut = kept[:, None], cut[:, None]
        items = a.shape[1] if mask is None else np.maximum(task.items.numpy(), 1).astype(a.dtype)
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
            arguments = (*ctx.task.arguments[:-1], False)
            return through_reference(lambda x: topk_loss.reference(x, *arguments)[0], [scores], [grad])[0], None
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
