"""Hard top-k: 1 for the k best items and 0 for all others, with an optional straight-through gradient."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import OperatorOptions, SoftSelection, TopKOperator, clamped, registry
from recsys_topk.ops.dispatch import apply
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.sorting import sort_descending


class HardTopK(TopKOperator):
    """Membership 1 for the k best items and 0 for all others. Among equal scores the earlier item is selected.

    The gradient is 0. With `straight_through`, the value stays hard, and log p and log(1 - p) get the gradients of
    another operator. In a cross-entropy the value is clamped to [1e-6, 1 - 1e-6]; the gradient is not clamped. The loss
    ``hard`` uses the gradient of dftopk by default.

    Args:
        tau: Temperature of the operator that provides the gradient; the value does not depend on it.
        straight_through: Name of that operator, e.g. ``"dftopk"``; None = no gradient.
        options: See `TopKOperator`.

    Example:
        >>> HardTopK()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p
        tensor([[1., 0., 1., 0.]])
    """

    name, cost = "hard", "n log n"
    tie_fair = False
    scales_with_tau = False
    exact_gradient = False
    loss_defaults = MappingProxyType({"straight_through": "dftopk"})

    def __init__(
        self, tau: float = 1.0, straight_through: str | None = None, **options: Unpack[OperatorOptions]
    ) -> None:
        super().__init__(tau, **options)
        self.straight_through = straight_through
        self.surrogate = None if straight_through is None else registry.get(straight_through, tau=tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        chosen = hard_topk(scores, k, mask)
        log_p = torch.where(chosen, 0.0, torch.full_like(scores, -math.inf).detach())
        log_q = torch.where(chosen, -math.inf, torch.zeros_like(scores).detach())
        if self.surrogate is None:
            soft_p = soft_q = torch.where(mask, scores, 0.0) * 0.0
        else:
            soft = self.surrogate.select(scores, k, mask)
            soft_p, soft_q = soft.log_p, soft.log_q
        return SoftSelection(straight_through(log_p, soft_p), straight_through(log_q, soft_q), mask)

    def bounded(self, selection: SoftSelection) -> SoftSelection:
        """Clamp the value. The straight-through gradient does not change."""
        value = clamped(SoftSelection(selection.log_p.detach(), selection.log_q.detach(), selection.mask))
        return SoftSelection(
            straight_through(value.log_p, selection.log_p), straight_through(value.log_q, selection.log_q), value.mask
        )

    def extra_repr(self) -> str:
        """Show the operator that provides the gradient."""
        return f"straight_through={self.straight_through!r}"


def hard_topk(scores: Tensor, k: int | Tensor, mask: Tensor) -> Tensor:
    """Return which items are the k best of their list, boolean (B, N), exactly k per list."""
    filled = scores.detach() if is_full(mask) else fill_masked(scores.detach(), mask, -math.inf)
    _, order = sort_descending(filled)
    first = torch.arange(scores.shape[1], device=scores.device) < (k[:, None] if isinstance(k, Tensor) else k)
    return torch.zeros_like(mask).contiguous().scatter(1, order, first.expand_as(order))


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """Return `value`. Its gradient is passed to `surrogate` unchanged."""
    result: Tensor = apply(_StraightThrough, value, surrogate)
    return result


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad

    @staticmethod
    def tangents(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()
