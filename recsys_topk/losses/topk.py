"""Binary cross-entropy between an operator's membership and the true top k."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss, Reduction
from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.count_true import count_true
from recsys_topk.ops.dispatch import apply
from recsys_topk.ops.fill_masked import fill_masked
from recsys_topk.ops.topk_loss import CLAMP, Law
from recsys_topk.ops.topk_target import topk_target


def selection_bce(selection: SoftSelection, target: Tensor) -> Tensor:
    """Return the cross-entropy of each list, the mean over its valid items of -(y log p + (1 - y) log(1 - p)), (B,).

    Args:
        selection: The membership.
        target: (B, N), 0 or 1.

    Example:
        >>> log_p, log_q = torch.tensor([[-0.1, -2.0]]), torch.tensor([[-2.0, -0.1]])
        >>> selection_bce(SoftSelection(log_p, log_q, torch.tensor([[True, True]])), torch.tensor([[1.0, 0.0]]))
        tensor([0.1000])
    """
    mask = None if is_full(selection.mask) else selection.mask
    items = target.shape[1] if mask is None else count_true(mask).clamp_min(1)
    losses: Tensor = apply(_CrossEntropy, selection.log_p, selection.log_q, target, mask, items)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Linear in both logs, so the backward pass needs the target only, and -inf times 0 never arises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_p: Tensor, log_q: Tensor, target: Tensor, mask: Tensor | None, items: Tensor | int) -> Tensor:
        chosen = torch.where(target > 0.5, log_p, log_q)
        chosen = chosen if mask is None else fill_masked(chosen, mask, 0.0)
        return -chosen.sum(1) / items

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, target, mask, items = inputs
        ctx.items = None if isinstance(items, Tensor) else items
        ctx.save_for_backward(target, *(x for x in (mask, items) if isinstance(x, Tensor)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        target, *masked = ctx.saved_tensors
        share = (grad / (masked[1] if masked else ctx.items)).unsqueeze(1)
        grad_p = target * -share
        grad_q = -share - grad_p
        return grad_p, fill_masked(grad_q, masked[0], 0.0) if masked else grad_q, None, None, None


def clamp_selection(selection: SoftSelection) -> SoftSelection:
    """Keep memberships inside [1e-6, 1 - 1e-6], with zero gradient outside: for operators with exact zeros and ones."""
    low, high = math.log(CLAMP), math.log1p(-CLAMP)
    return SoftSelection(selection.log_p.clamp(low, high), selection.log_q.clamp(low, high), selection.mask)


class TopKLoss(RankingLoss):
    """Base of the losses that ask an operator which items it would select.

    L = mean over valid items of -(y log p + (1 - y) log(1 - p)), with p the operator's membership at k and y the true
    top k (see `topk_target`). A subclass builds its operator and passes it on.

    Class attributes:
        clamped: The operator has memberships of exactly 0 and 1, which are moved to 1e-6 and 1 - 1e-6 here.

    Args:
        operator: The operator whose membership is trained.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.
    """

    label_kind: ClassVar[Literal["graded", "binary"]] = "binary"
    family: ClassVar[str] = "top-k"
    requires_k: ClassVar[bool] = True
    clamped: ClassVar[bool] = False
    operator: TopKOperator

    def __init__(
        self,
        operator: TopKOperator,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        super().__init__(k=k, positive_above=positive_above, reduction=reduction, validate=validate)
        self.operator = operator

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        target = topk_target(labels, mask, k, self.positive_above)
        return selection_bce(self.clamp(self.operator.select(scores, k, mask)), target)

    def _law(self) -> Law | None:
        plain = type(self).per_list is TopKLoss.per_list and type(self).clamp is TopKLoss.clamp
        law = self.operator.law() if plain else None
        return law if law is not None and self.clamped == (law.name == "clip") else None

    def clamp(self, selection: SoftSelection) -> SoftSelection:
        """Return the selection as it enters the cross-entropy: without exact zeros and ones."""
        return clamp_selection(selection) if self.clamped else selection
