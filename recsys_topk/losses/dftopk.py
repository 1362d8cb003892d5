"""DFTopK-BCE: cross-entropy around the midpoint of the k-th and (k+1)-th score."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys_topk.losses.base import ListFacts, Reduction
from recsys_topk.losses.topk import TopKLoss, target_numpy
from recsys_topk.numerics import LOWEST_EXPONENT
from recsys_topk.operators.dftopk import DFTopK
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.fill_masked import fill_masked
from recsys_topk.ops.kth_pair import Array, Bools, add_shared, pair_numpy, scratch

# Up to this many items in the batch the number of calls decides, and beyond it the number of passes over memory.
SHORT = 4096

# Halves of rows shorter than this are not worth folding.
FOLD_FROM = 64


class DFTopKLoss(TopKLoss):
    """Cross-entropy of the DFTopK membership.

    L = mean_i softplus(z_i) - y_i z_i with z_i = (x_i - theta) / tau, theta = alpha x_[k] + (1 - alpha) x_[k+1].
    Linear in N; a good first choice.

    Args:
        tau: Temperature.
        alpha: Where the threshold lies between x_[k+1] (0) and x_[k] (1).
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = DFTopKLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.8377)
    """

    name: ClassVar[str] = "dftopk"
    cost: ClassVar[str] = "n"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv 2510.11472"

    def __init__(
        self,
        tau: float = 1.0,
        alpha: float = 0.5,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = DFTopK(tau, alpha)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
        self.tau, self.alpha = operator.tau, operator.alpha

    def _lists(
        self, scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | Tensor | None, facts: ListFacts
    ) -> Tensor:
        assert k is not None
        if not may_read(scores):
            return super()._lists(scores, labels, mask, k, facts)
        target = target_numpy(labels.detach().numpy(), facts.positive.numpy(), k, facts.positives.numpy())
        task = _Task(target, mask, k, facts, self.tau, self.alpha)
        fused: Tensor = _FusedBCE.apply(scores, task)  # type: ignore[no-untyped-call]
        return fused


class _Task(NamedTuple):
    """All that the fused loss needs besides the scores (every argument of a Function's `apply` costs time)."""

    target: Bools
    mask: Tensor | None
    k: int | Tensor
    facts: ListFacts
    tau: float
    alpha: float


class _FusedBCE(torch.autograd.Function):
    """The loss of each list and its closed-form gradient, on CPU.

    With s_i = 1 - 2 y_i and t_i = s_i (x_i - theta) / tau the loss of an item is softplus(t_i) and its derivative
    g_i = s_i sigmoid(t_i) / tau, free of cancellation for both targets; the items at x_[k] and x_[k+1] then receive
    -alpha and -(1 - alpha) times the sum of g. Masked scores are -inf here, and drop out of every term by themselves.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, task: _Task) -> Tensor:
        target, mask, k, facts, tau, alpha = task
        x = scores.detach() if mask is None else fill_masked(scores.detach(), mask, -math.inf)
        a = x.numpy()
        ks = k.numpy() if isinstance(k, Tensor) else k
        if facts.counted is not None:
            left_out = ~facts.counted.numpy()
            a, target = a.copy() if mask is None else a, target.copy()
            a[left_out] = 0.0
            target[left_out] = False
            ks = np.where(left_out, 1, ks)
        kept, cut = pair_numpy(a, ks, reuse=True)
        kept, cut = kept[:, None], cut[:, None]
        items = a.shape[1] if facts.items is None else np.maximum(facts.items.numpy(), 1).astype(a.dtype)
        ctx.short = a.size <= SHORT
        terms = _short_terms if ctx.short else _long_terms
        with np.errstate(invalid="ignore", over="ignore"):  # of scores that are not finite
            theta = cut + a.dtype.type(alpha) * (kept - cut)
            total, gradient = terms(a, theta, target, tau, ctx.needs_input_grad[0])
        if gradient is not None:
            summed = np.add.reduce(gradient, 1) if ctx.short else torch.from_numpy(gradient).sum(1).numpy()
            add_shared(gradient, a, kept, summed * a.dtype.type(-alpha))
            add_shared(gradient, a, cut, summed * a.dtype.type(alpha - 1.0))
            if ctx.short:
                gradient /= items if isinstance(items, int) else items[:, None]
            ctx.save_for_backward(torch.from_numpy(gradient))
        total /= items
        ctx.items = items
        return torch.from_numpy(total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        if not ctx.short:  # a short one has been divided already
            grad = grad / (ctx.items if isinstance(ctx.items, int) else torch.from_numpy(ctx.items))
        return gradient * (grad if grad.shape[0] == 1 else grad.unsqueeze(1)), None


def _short_terms(a: Array, theta: Array, target: Bools, tau: float, with_gradient: bool) -> tuple[Array, Array | None]:
    """Return the sum of the item losses of each list, (B,), and s sigmoid(t) / tau, (B, N): few calls, in numpy."""
    sign = (0.5 - target.astype(a.dtype)) * a.dtype.type(2.0 / tau)
    t = (a - theta) * sign
    e = np.exp(-np.abs(t))
    total = np.add.reduce(np.log1p(e) + np.maximum(t, 0), 1)
    return total, sign * np.where(t >= 0, 1, e) / (1 + e) if with_gradient else None


def _long_terms(a: Array, theta: Array, target: Bools, tau: float, with_gradient: bool) -> tuple[Array, Array | None]:
    """Return what `_short_terms` returns: few passes, in place, in torch."""
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
