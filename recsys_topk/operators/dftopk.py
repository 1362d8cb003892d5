"""DFTopK: a logistic membership around the midpoint of the k-th and (k+1)-th score."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.operators.base import OperatorOptions, SoftSelection, TopKOperator
from recsys_topk.operators.score_scale import Tau
from recsys_topk.ops.selection.membership import Law, membership_logs


class DFTopK(TopKOperator):
    """Logistic membership around the midpoint of the k-th and (k+1)-th score.

    p_i = sigmoid((x_i - theta) / tau), theta = alpha x_[k] + (1 - alpha) x_[k+1]; theta is differentiated. Cost: O(N).
    The membership does not sum to k: its sum tends to k as tau goes to 0 and to N / 2 as tau grows.

    Choose tau by the scale of the scores: their standard deviation within a list is a good start, and ``"auto"``
    measures it. If tau is much larger, all items have nearly the same membership, and little is learnt; if it is much
    smaller, only the items next to the threshold get a gradient.

    Args:
        tau: Temperature.
        alpha: Position of the threshold between x_[k+1] (0) and x_[k] (1).
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> DFTopK(tau=0.1)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[1.0000, 0.0070, 0.9930, 0.0000]])
    """

    name, cost = "dftopk", "n"
    sums_to_k = False
    takes_item_weights = True
    paper = "Zhu et al. 2025, arXiv 2510.11472"

    def __init__(self, tau: Tau = 1.0, alpha: float = 0.5, **options: Unpack[OperatorOptions]) -> None:
        super().__init__(tau, **options)
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], got {alpha!r}")
        self.alpha = float(alpha)

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("dftopk", self.tau, self.alpha)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        return SoftSelection(*membership_logs(scores, k, mask, DFTopK.law(self)), mask)

    def extra_repr(self) -> str:
        """Show the temperature and, if it is not 1/2, alpha."""
        return super().extra_repr() + ("" if self.alpha == 0.5 else f", alpha={self.alpha:g}")
