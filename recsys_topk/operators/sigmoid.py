"""Sigmoid top-k: a logistic membership with the threshold at which it sums to k exactly."""

from __future__ import annotations

from torch import Tensor

from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.selection.membership import Law, membership_logs


class SigmoidTopK(TopKOperator):
    """Logistic membership around the threshold at which it sums to k: DFTopK with an exact sum.

    p_i = sigmoid((x_i - b) / tau), b solves sum_i p_i = k. Newton's method finds b in a few passes, O(N) each; the
    gradient follows from the implicit function theorem, db/dx_i = p_i (1 - p_i) / sum_j p_j (1 - p_j).

    Choose tau by the scale of the scores, as for `DFTopK`: start with their standard deviation within a list, or with
    ``"auto"``.

    Args:
        tau: Temperature.
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> SigmoidTopK()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.8180, 0.3780, 0.6220, 0.1820]])
    """

    name, cost = "sigmoid", "n"
    takes_item_weights = True
    paper = "the strict form of DFTopK; equal to two-anchor entropic transport (Xie et al. 2020)"

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("logistic", self.tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        return SoftSelection(*membership_logs(scores, k, mask, SigmoidTopK.law(self)), mask)
