"""Binary cross-entropy between an operator's membership and the true top k."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss, Reduction
from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.count_true import count_true
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.fill_masked import fill_masked
from recsys_topk.ops.kth_pair import Array, Bools, pair_numpy

CLAMP = 1e-6


def topk_target(labels: Tensor, mask: Tensor, k: int | Tensor, positive_above: float = 0.0) -> Tensor:
    """Return which items truly are in the top k, as 0/1 in the dtype of `labels`, (B, N).

    y_i = 1 if item i is valid, positive, and its label is >= the k-th largest valid label of its list. Labels tied
    at the boundary are all in, so that the target does not depend on the order of the items.

    Example:
        >>> topk_target(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), 2)
        tensor([[1., 0., 0., 1.]])
    """
    valid = labels > positive_above
    positive = valid if is_full(mask) else valid & mask
    if may_read(labels):
        return torch.from_numpy(target_numpy(labels.detach().numpy(), positive.numpy(), k)).to(labels.dtype)
    index = k[:, None] if isinstance(k, Tensor) else torch.full((labels.shape[0], 1), k, device=labels.device)
    ordered = torch.where(positive, labels, -math.inf).sort(-1, descending=True).values
    boundary = ordered.gather(1, (index - 1).clamp(0, labels.shape[1] - 1))
    return (positive & (labels >= boundary) & (index > 0)).to(labels.dtype)


def target_numpy(
    labels: Array,
    positive: Bools,
    k: int | Tensor,
    positives: Array | None = None,
) -> Bools:
    """Return the target of `topk_target`, (B, N) boolean; `positive` itself if no list has more than k positives.

    Labels are looked at only in lists with more positives than k, and selected among only if they differ, so binary
    labels cost a pass of counting.

    Args:
        labels: (B, N).
        positive: Boolean (B, N), the valid positive items.
        k: One int, or one a list, (B,).
        positives: (B,), the number of positives, if known.
    """
    ks: Array | int = k.numpy() if isinstance(k, Tensor) else k
    target: Bools = positive
    crowded = (positive.sum(1) if positives is None else positives) > ks
    if not crowded.any():
        return target
    values = labels[positive]
    if values.min() == values.max():  # binary labels: all positives are tied at the boundary
        return target if np.min(ks) > 0 else target & (np.reshape(ks, (-1, 1)) > 0)
    rows = np.flatnonzero(crowded)
    wanted = ks[rows] if isinstance(ks, np.ndarray) else np.full(rows.size, ks)
    inside = np.where(positive[rows], labels[rows], -np.inf).astype(labels.dtype, copy=False)
    boundary, _ = pair_numpy(inside, np.maximum(wanted, 1))
    target = positive.copy()
    target[rows] &= (labels[rows] >= boundary[:, None]) & (wanted > 0)[:, None]
    return target


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
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        selection.log_p, selection.log_q, target, mask
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Linear in both logs, so the backward pass needs the target only, and -inf times 0 never arises."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        chosen = torch.where(target > 0.5, log_p, log_q)
        chosen = chosen if mask is None else fill_masked(chosen, mask, 0.0)
        items = torch.full_like(target[:, 0], target.shape[1]) if mask is None else count_true(mask).clamp_min(1)
        ctx.save_for_backward(target, items, mask)
        return -chosen.sum(1) / items

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        target, items, mask = ctx.saved_tensors
        share = (grad / items).unsqueeze(1)
        grad_p = target * -share
        grad_q = -share - grad_p
        return grad_p, grad_q if mask is None else fill_masked(grad_q, mask, 0.0), None, None


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

    def clamp(self, selection: SoftSelection) -> SoftSelection:
        """Return the selection as it enters the cross-entropy: without exact zeros and ones."""
        return clamp_selection(selection) if self.clamped else selection
