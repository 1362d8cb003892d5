"""Hard top-k BCE: a hard membership with the gradient of a soft one."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss, clamp_selection
from recsys_topk.operators.base import SoftSelection
from recsys_topk.operators.hard import HardTopK, straight_through


class HardTopKLoss(TopKLoss):
    """Cross-entropy of the hard top k, trained by the gradient of another operator (straight-through).

    Memberships of 0 and 1 count as 1e-6 and 1 - 1e-6, so the value is the fraction of items on the wrong side times
    log 1e6; the gradient is that of the lender's own log-membership.

    Args:
        tau: Temperature of the operator that lends its gradient.
        straight_through: Name of that operator; None = no gradient.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = HardTopKLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(6.9078)
    """

    name: ClassVar[str] = "hard"
    cost: ClassVar[str] = HardTopK.cost
    paper: ClassVar[str] = HardTopK.paper
    clamped: ClassVar[bool] = True

    def __init__(
        self,
        tau: float = 1.0,
        straight_through: str | None = "dftopk",
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = HardTopK(tau, straight_through)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)

    def clamp(self, selection: SoftSelection) -> SoftSelection:
        """Clamp the value alone: the lent gradient passes."""
        value = clamp_selection(SoftSelection(selection.log_p.detach(), selection.log_q.detach(), selection.mask))
        return SoftSelection(
            straight_through(value.log_p, selection.log_p), straight_through(value.log_q, selection.log_q), value.mask
        )
