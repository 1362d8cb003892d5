"""Softmax cross-entropy of vectors against every item of a catalogue, without storing the logits."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE: Final = 1 << 21
"""Maximum number of logits in memory at once."""


def catalogue_softmax(
    requests: Tensor,
    items: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    *,
    tau: float = 1.0,
    shift: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum over lists of -log softmax_j(<u_b, v_j> / tau - shift_j) at the target item.

    sum_b w_b (log sum_j exp(z_bj) - z_b,t(b)), z_bj = <u_b, v_j> / tau - shift_j.

    The logits (B, M) are computed for some lists at a time and are not kept. The gradient is exact: it is computed with
    the value, so that each logit is computed once. Cost: three matrix products of B M D multiplications (one without
    gradients). Memory: O(M + `LOGITS_AT_ONCE`) beside the gradients.

    Args:
        requests: (B, D), float32 or float64.
        items: (M, D), all items.
        target: (B,) int64, the row of the positive item of each list.
        weights: (B,), the weight of each list; None = 1 / B each. They get no gradient.
        tau: Temperature.
        shift: (M,), subtracted from the logits of each item, e.g. the log of its sampling probability. It gets no
            gradient. The logits of target items are not shifted where they are targets.

    Returns:
        A scalar.

    Example:
        >>> u, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
        >>> catalogue_softmax(u, v, torch.tensor([0]))
        tensor(1.4076)
    """
    if weights is None:
        weights = requests.new_full((len(requests),), 1.0 / max(1, len(requests)))
    total: Tensor = _CatalogueSoftmax.apply(requests, items, target, weights.detach(), tau, shift)  # type: ignore[no-untyped-call]
    return total


class _CatalogueSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        requests: Tensor,
        items: Tensor,
        target: Tensor,
        weights: Tensor,
        tau: float,
        shift: Tensor | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = requests.new_zeros(())
        grad_requests = torch.empty_like(requests) if wanted else None
        grad_items = torch.zeros_like(items) if wanted else None
        step = max(1, LOGITS_AT_ONCE // max(1, len(items)))
        for start in range(0, len(requests), step):
            rows = slice(start, start + step)
            u, t, w = requests[rows] / tau, target[rows, None], weights[rows]
            z = u @ items.T
            of_target = z.gather(1, t)
            if shift is not None:
                z -= shift
                z.scatter_(1, t, of_target)
            largest = z.amax(1, keepdim=True)
            p = z.sub_(largest).exp_()
            normaliser = p.sum(1, keepdim=True)
            total += (w * (normaliser.log() + largest - of_target).squeeze(1)).sum()
            if grad_requests is not None and grad_items is not None:
                p *= w[:, None] / normaliser
                p.scatter_add_(1, t, -w[:, None])
                torch.mm(p, items, out=grad_requests[rows])
                grad_items.addmm_(p.T, u)
        if grad_requests is not None:
            grad_requests /= tau
        ctx.save_for_backward(grad_requests, grad_items)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_requests, grad_items = ctx.saved_tensors
        return grad * grad_requests, grad * grad_items, None, None, None, None
