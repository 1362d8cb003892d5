"""SOFT top-k: entropic optimal transport of the scores onto two anchors, in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.membership import Law, membership_logs


class SinkhornTopK(TopKOperator):
    """Entropic optimal transport of n items onto two anchors, "out" and "in", with masses n - k and k (SOFT).

    The cost of item i is (x_i + 1)^2 for "out" and x_i^2 for "in", divided by the largest cost c of the list (a
    constant for the gradient, as in the original), regularised by epsilon = tau. With two anchors only one dual
    variable matters: the plan is the sigmoid operator at temperature tau c / 2, and no Sinkhorn iterations are needed.
    Because c depends on the location of the scores, the membership is not invariant to a shift of the scores.

    Args:
        tau: The entropic regularisation epsilon.
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> SinkhornTopK(tau=0.1)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.8670, 0.3490, 0.6510, 0.1330]])
    """

    name, cost = "sinkhorn", "n"
    exact_gradient = False
    scales_with_tau = False
    paper = "Xie et al. 2020, arXiv 2002.06504"

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        x = scores.detach()
        high = (x if is_full(mask) else fill_masked(x, mask, -math.inf)).amax(1, keepdim=True)
        low = (x if is_full(mask) else -fill_masked(-x, mask, -math.inf)).amin(1, keepdim=True)
        # x^2 and (x + 1)^2 are largest at the smallest or the largest score of the list.
        largest = (high * high).maximum((high + 1.0).square()).maximum(low * low).maximum((low + 1.0).square())
        # Squares of scores above 1e19 overflow in float32; the membership is k / n already for smaller scores.
        temperature = (0.5 * self.tau * largest).clamp_max(1e-3 * torch.finfo(x.dtype).max)
        return SoftSelection(*membership_logs(scores, k, mask, Law("logistic", self.tau), temperature), mask)
