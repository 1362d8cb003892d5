"""Scores minus the threshold at which a membership sums to k, with the implicit derivative of that threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import apply, sampled, save

Law = Literal["logistic", "laplace", "uniform"]


def from_threshold(filled: Tensor, threshold: Tensor, tau: Tensor | float, law: Law) -> Tensor:
    """Return z = (x - b) / tau, (B, N), differentiable to any order.

    b is where sum_i F(z_i) = k, F the distribution function of the law and f its density, so that
    db/dx_i = f(z_i) / sum_j f(z_j). (For ``"uniform"``, F(z) = clip(z, 0, 1).)

    Args:
        filled: (B, N), -inf where masked.
        threshold: b, (B, 1). Its gradient is the one above, whatever computed it.
        tau: Temperature, one number or (B, 1); a constant for the gradient.
        law: Which law.
    """
    z: Tensor = apply(_FromThreshold, filled, threshold.detach(), tau, law)
    return z


class _FromThreshold(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(filled: Tensor, threshold: Tensor, tau: Tensor | float, law: Law) -> Tensor:
        return (filled - threshold) / tau

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | float, Law], output: Tensor) -> None:
        _, _, tau, ctx.law = inputs
        ctx.tau = None if isinstance(tau, Tensor) else tau
        save(ctx, output, *([tau] if isinstance(tau, Tensor) else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        z, *rest = ctx.saved_tensors
        tau = ctx.tau if ctx.tau is not None else rest[0]
        return (grad - shares(z, ctx.law) * grad.sum(1, keepdim=True)) / tau, None, None, None

    @staticmethod
    def tangents(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        z, *rest = ctx.saved_tensors
        tau = ctx.tau if ctx.tau is not None else rest[0]
        moved: Tensor = (tangent - (shares(z, ctx.law) * tangent).sum(1, keepdim=True)) / tau
        return moved


def shares(z: Tensor, law: Law) -> Tensor:
    """Return f(z_i) / sum_j f(z_j), (B, N); finite for any distance from the threshold, and 0 where z is -inf."""
    if law == "uniform":
        inside = ((z > 0.0) & (z < 1.0)).to(z.dtype)
        return inside / inside.sum(1, keepdim=True).clamp_min(1.0)
    far = -z.abs()
    return torch.softmax(far if law == "laplace" else far - 2.0 * torch.log1p(torch.exp(far)), dim=1)


@sampled(from_threshold)
def _samples(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | float, Law]]:
    laws: tuple[Law, ...] = ("logistic", "laplace", "uniform")
    for law in laws:
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        yield x.requires_grad_(), torch.zeros(3, 1, dtype=torch.float64), 0.7, law
