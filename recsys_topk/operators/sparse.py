"""Sparse top-k: the Euclidean projection of the scores onto the k-subset polytope, with exact zeros and ones."""

from __future__ import annotations

from torch import Tensor

from recsys_topk.operators.base import SoftSelection, TopKOperator, clamped
from recsys_topk.ops.selection.membership import Law, membership_logs


class SparseTopK(TopKOperator):
    """Projection of x / tau onto {0 <= p <= 1, sum p = k}. Memberships far from the threshold are exactly 0 or 1.

    p_i = clip(x_i / tau - t, 0, 1), t solves sum_i p_i = k (Sander et al. 2023 with p = 2; the isotonic form is the
    same map). Newton's method finds t in O(N) per pass; t is exact when the set of fractional items stops changing. The
    gradient is (g - mean of g) / tau over the fractional items and 0 for all others. In a cross-entropy the membership
    is clamped to [1e-6, 1 - 1e-6].

    Args:
        tau: Regularisation (l in the paper); smaller is sparser.
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> SparseTopK(tau=2.0)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p
        tensor([[1.0000, 0.2500, 0.7500, 0.0000]])
    """

    name, cost = "sparse", "n"
    takes_item_weights = True
    paper = "Sander et al. 2023, arXiv 2302.01425"

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("clip", self.tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        return SoftSelection(*membership_logs(scores, k, mask, SparseTopK.law(self)), mask)

    def bounded(self, selection: SoftSelection) -> SoftSelection:
        """Clamp memberships of exactly 0 and 1."""
        return clamped(selection)
