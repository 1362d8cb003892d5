"""Scores minus the threshold at which a membership sums to k, with the implicit derivative of that threshold."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import apply, save

Law = Literal["logistic", "laplace", "uniform"]


def from_threshold(
    filled: Tensor, threshold: Tensor, tau: Tensor | float, law: Law, weights: Tensor | None = None
) -> Tensor:
    """Return z = (x - b) / tau, (B, N), differentiable to any order.

    b is where sum_i w_i F(z_i) = k, F the distribution function of the law and f its density, so that
    db/dx_i = w_i f(z_i) / sum_j w_j f(z_j). (For ``"uniform"``, F(z) = clip(z, 0, 1).)

    Args:
        filled: (B, N), -inf where masked.
        threshold: b, (B, 1). Its gradient is the one above, whatever computed it.
        tau: Temperature, one number or (B, 1); a constant for the gradient.
        law: Which law.
        weights: w, (B, N), a constant for the gradient; None = 1.
    """
    z: Tensor = apply(_FromThreshold, filled, threshold.detach(), tau, law, weights)
    return z


class _FromThreshold(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(filled: Tensor, threshold: Tensor, tau: Tensor | float, law: Law, weights: Tensor | None) -> Tensor:
        return (filled - threshold) / tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, tau, ctx.law, weights = inputs
        ctx.tau = None if isinstance(tau, Tensor) else tau
        save(ctx, output, *[given for given in (tau, weights) if isinstance(given, Tensor)])

    @staticmethod
    def saved(ctx: Any) -> tuple[Tensor, Tensor | float]:
        """Return the shares of the items, and tau."""
        z, *rest = ctx.saved_tensors
        tau = rest.pop(0) if ctx.tau is None else ctx.tau
        return shares(z, ctx.law, rest[0] if rest else None), tau

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, tau = _FromThreshold.saved(ctx)
        return (grad - share * grad.sum(1, keepdim=True)) / tau, None, None, None, None

    @staticmethod
    def tangents(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        share, tau = _FromThreshold.saved(ctx)
        moved: Tensor = (tangent - (share * tangent).sum(1, keepdim=True)) / tau
        return moved


def shares(z: Tensor, law: Law, weights: Tensor | None = None) -> Tensor:
    """Return w_i f(z_i) / sum_j w_j f(z_j), (B, N); finite for any distance of the threshold, 0 where z is -inf."""
    if law == "uniform":
        inside = ((z > 0.0) & (z < 1.0)).to(z.dtype)
        if weights is None:
            return inside / inside.sum(1, keepdim=True).clamp_min(1.0)
        inside = inside * weights
        return inside / inside.sum(1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    far = -z.abs()
    logs = far if law == "laplace" else far - 2.0 * torch.log1p(torch.exp(far))
    return torch.softmax(logs if weights is None else logs + torch.log(weights), dim=1)
