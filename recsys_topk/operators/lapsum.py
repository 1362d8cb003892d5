"""LapSum: a Laplace membership that sums to k exactly."""

from __future__ import annotations

from torch import Tensor

from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.selection.membership import Law, membership_logs


class LapSum(TopKOperator):
    """Laplace membership around the threshold at which it sums to k.

    p_i = F((x_i - b) / tau), F the distribution function of the standard Laplace law, b solves sum_i p_i = k. With
    e_i = exp(-|x_i - b| / tau) the gradient of the threshold is db/dx_i = e_i / sum_j e_j. The threshold is found
    without a sort, in two to four passes over the list, O(N) each (see `laplace_threshold`). k may be a fraction.

    Choose tau by the scale of the scores, as for `DFTopK`: start with their standard deviation within a list, or with
    ``"auto"``.

    Args:
        tau: Temperature (alpha in the paper; larger is smoother).
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> LapSum()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.8880, 0.3030, 0.6970, 0.1120]])
        >>> LapSum()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=1.5).p.sum().round(decimals=3)
        tensor(1.5000)
    """

    name, cost = "lapsum", "n"
    fractional_k = True
    takes_item_weights = True
    paper = "Struski et al. 2025, arXiv 2503.06242"

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("laplace", self.tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        return SoftSelection(*membership_logs(scores, k, mask, LapSum.law(self)), mask)
