"""Binary cross-entropy between an operator's membership and the true top k."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss, Reduction
from recsys_topk.numerics import masked_mean
from recsys_topk.operators.base import SoftSelection, TopKOperator


def topk_target(labels: Tensor, mask: Tensor, k: int | Tensor, positive_above: float = 0.0) -> Tensor:
    """Return which items truly are in the top k, as 0/1 in the dtype of `labels`, (B, N).

    y_i = 1 if item i is valid, positive, and its label is >= the k-th largest valid label of its list. Labels tied
    at the boundary are all in, so that the target does not depend on the order of the items.

    Example:
        >>> topk_target(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), 2)
        tensor([[1., 0., 0., 1.]])
    """
    index = k[:, None] if isinstance(k, Tensor) else torch.full((labels.shape[0], 1), k, device=labels.device)
    ordered = torch.where(mask, labels, -math.inf).sort(-1, descending=True).values
    boundary = ordered.gather(1, (index - 1).clamp(0, labels.shape[1] - 1))
    return (mask & (labels > positive_above) & (labels >= boundary)).to(labels.dtype)


def selection_bce(selection: SoftSelection, target: Tensor) -> Tensor:
    """Return the cross-entropy of each list, the mean over its valid items of -(y log p + (1 - y) log(1 - p)), (B,)."""
    log_p = torch.where(selection.mask, selection.log_p, 0.0)
    log_q = torch.where(selection.mask, selection.log_q, 0.0)
    return masked_mean(-(target * log_p + (1.0 - target) * log_q), selection.mask)


class TopKLoss(RankingLoss):
    """Base of the losses that ask an operator which items it would select.

    L = mean over valid items of -(y log p + (1 - y) log(1 - p)), with p the operator's membership at k and y the true
    top k (see `topk_target`). A subclass builds its operator and passes it on.

    Args:
        operator: The operator whose membership is trained.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on NaN or infinity among valid scores.
    """

    label_kind: ClassVar[Literal["graded", "binary"]] = "binary"
    family: ClassVar[str] = "top-k"
    requires_k: ClassVar[bool] = True
    operator: TopKOperator

    def __init__(
        self,
        operator: TopKOperator,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float = 0.0,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        super().__init__(k=k, positive_above=positive_above, reduction=reduction, validate=validate)
        self.operator = operator

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        target = topk_target(labels, mask, k, self.positive_above)
        return selection_bce(self.operator.select(scores, k, mask), target)
