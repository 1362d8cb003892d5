"""DFTopK-BCE: cross-entropy around the midpoint of the k-th and (k+1)-th score."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from recsys_topk.losses.base import ListFacts, Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.dftopk import DFTopK
from recsys_topk.ops.losses.dftopk_bce import dftopk_bce
from recsys_topk.ops.losses.topk_loss import Law
from recsys_topk.ops.losses.topk_target import best_positives


class DFTopKLoss(TopKLoss):
    """Cross-entropy of the DFTopK membership.

    L = mean_i softplus(z_i) - y_i z_i with z_i = (x_i - theta) / tau, theta = alpha x_[k] + (1 - alpha) x_[k+1].
    Cost: O(N). A good default.

    Args:
        tau: Temperature.
        alpha: Position of the threshold between x_[k+1] (0) and x_[k] (1).
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as set by the data, or 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = DFTopKLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.8377)
    """

    name: ClassVar[str] = "dftopk"
    cost: ClassVar[str] = "n"
    paper: ClassVar[str] = "Zhu et al. 2025, arXiv 2510.11472"

    def __init__(
        self,
        tau: float = 1.0,
        alpha: float = 0.5,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = DFTopK(tau, alpha)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
        self.tau, self.alpha = operator.tau, operator.alpha

    def _law(self) -> Law:
        return Law("dftopk", self.tau, self.alpha)

    def _list_losses(
        self, scores: Tensor, labels: Tensor, mask: Tensor | None, k: int | Tensor | None, facts: ListFacts
    ) -> Tensor:
        assert k is not None
        target = best_positives(labels, facts.positive, k, facts.positives)
        return dftopk_bce(scores, target, mask, k, facts.items, facts.counted, self.tau, self.alpha)
