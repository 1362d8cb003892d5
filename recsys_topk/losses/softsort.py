"""SoftSort-BCE: cross-entropy of the top-k mass of a relaxed permutation."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.softsort import SoftSort


class SoftSortLoss(TopKLoss):
    """Cross-entropy of SoftSort's normalised top-k mass.

    L = mean_i -(y_i log u_i + (1 - y_i) log d_i), u and d the shares of item i in the first k rows of the relaxed
    permutation and in the rest, each with its own gradient (the loss of a stage in LCRON). O(n log n) time.

    Args:
        tau: Temperature.
        eps: Added to the normaliser of the masses (LCRON's published loss has 1e-6).
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = SoftSortLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.9866)
    """

    name: ClassVar[str] = "softsort"
    cost: ClassVar[str] = SoftSort.cost
    paper: ClassVar[str] = SoftSort.paper

    def __init__(
        self,
        tau: float = 1.0,
        eps: float = 0.0,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = SoftSort(tau, eps=eps)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
