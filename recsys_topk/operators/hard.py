"""Hard top-k: 1 for the k best items, 0 for the rest, with a borrowed gradient if one is wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator, clamped, registry
from recsys_topk.ops.dispatch import apply
from recsys_topk.ops.fill_masked import fill_masked
from recsys_topk.ops.sorting import sort_descending


class HardTopK(TopKOperator):
    """Membership 1 for the k best items and 0 for the rest; equal scores are taken in their order of appearance.

    Its gradient is 0, or, with `straight_through`, that of another operator: the value is hard, the backward pass is
    the other's (log p and log(1 - p) each carry the other's gradient). In a cross-entropy the value is clamped to
    [1e-6, 1 - 1e-6] and the gradient is not; the loss of this name takes it from dftopk unless told otherwise.

    Args:
        tau: Temperature of the operator that lends its gradient; the value does not depend on it.
        straight_through: Name of that operator, e.g. ``"dftopk"``; None = no gradient.
        validate: Raise on NaN or infinity among valid scores.

    Example:
        >>> HardTopK()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p
        tensor([[1., 0., 1., 0.]])
    """

    name: ClassVar[str] = "hard"
    cost: ClassVar[str] = "n log n"
    tie_fair: ClassVar[bool] = False
    exact_gradient: ClassVar[bool] = False
    loss_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"straight_through": "dftopk"})

    def __init__(self, tau: float = 1.0, straight_through: str | None = None, *, validate: bool = False) -> None:
        super().__init__(tau, validate=validate)
        self.straight_through = straight_through
        self.lender = None if straight_through is None else registry.get(straight_through, tau=tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        chosen = hard_topk(scores, k, mask)
        log_p = torch.where(chosen, 0.0, torch.full_like(scores, -math.inf).detach())
        log_q = torch.where(chosen, -math.inf, torch.zeros_like(scores).detach())
        if self.lender is None:
            lent_p = lent_q = torch.where(mask, scores, 0.0) * 0.0
        else:
            lent = self.lender.select(scores, k, mask)
            lent_p, lent_q = lent.log_p, lent.log_q
        return SoftSelection(straight_through(log_p, lent_p), straight_through(log_q, lent_q), mask)

    def bounded(self, selection: SoftSelection) -> SoftSelection:
        """Clamp the value alone: the lent gradient passes."""
        value = clamped(SoftSelection(selection.log_p.detach(), selection.log_q.detach(), selection.mask))
        return SoftSelection(
            straight_through(value.log_p, selection.log_p), straight_through(value.log_q, selection.log_q), value.mask
        )

    def extra_repr(self) -> str:
        """Show where the gradient comes from."""
        return f"straight_through={self.straight_through!r}"


def hard_topk(scores: Tensor, k: int | Tensor, mask: Tensor) -> Tensor:
    """Return which items are the k best of their list, boolean (B, N), exactly k per list."""
    filled = scores.detach() if is_full(mask) else fill_masked(scores.detach(), mask, -math.inf)
    _, order = sort_descending(filled)
    first = torch.arange(scores.shape[1], device=scores.device) < (k[:, None] if isinstance(k, Tensor) else k)
    return torch.zeros_like(mask).contiguous().scatter(1, order, first.expand_as(order))


def straight_through(value: Tensor, lender: Tensor) -> Tensor:
    """Return `value`, with the gradient going to `lender`."""
    passed: Tensor = apply(_StraightThrough, value, lender)
    return passed


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, lender: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad
