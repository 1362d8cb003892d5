"""Sparse top-k: the Euclidean projection of the scores onto the k-subset polytope, with exact zeros and ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator, clamped
from recsys_topk.ops.losses.topk_loss import Law
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.clip import clip_logs, clip_threshold
from recsys_topk.ops.selection.fill_masked import fill_masked


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
    paper = "Sander et al. 2023, arXiv 2302.01425"

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("clip", self.tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
        ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
        x, gap = centred(filled, ks)
        threshold = clip_threshold(x.detach() / self.tau, gap / self.tau, ks)
        return SoftSelection(*clip_logs(x, threshold, self.tau), mask)

    def bounded(self, selection: SoftSelection) -> SoftSelection:
        """Clamp memberships of exactly 0 and 1."""
        return clamped(selection)
