"""ApproxNDCG: one minus NDCG with ranks approximated by logistic functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.numerics import SLACK
from recsys_topk.ops.losses.dcg import Gain, check_gain, discount, normalised_gains
from recsys_topk.ops.losses.soft_ranks import soft_ranks
from recsys_topk.ops.selection.kth_pair import kth_pair
from recsys_topk.ops.selection.weighted import weighted_pair


class ApproxNDCGLoss(RankingLoss):
    """One minus NDCG with approximate ranks: the rank of an item is 1 plus its soft comparisons with all other items.

    L = 1 - sum_i G_i m_i / log2(1 + r_i), r_i = 1 + sum_{j != i} s((x_j - x_i) / tau), G = gain / ideal DCG@k,
    s the logistic function. m_i = 1 without k; with k, m_i = p_i min(1, k / sum p), where p is the DFTopK membership of
    the ranks, s((theta - r_i) / tau) with theta midway between the k-th and the next rank. The factor min(1, k / sum p)
    bounds the sum of the memberships by k, so that 0 <= L <= 1. Without it NDCG@k can exceed 1, and a negative loss
    cannot be weighted by a learned variance.

    Shapes: scores, labels and mask (B, N). Labels: graded. Cost: O(p N) time for p items with a gain (with k, for all
    items), O(N) memory per list beyond a buffer of fixed size. Use it to optimise NDCG directly. Choose tau to match
    the scale of the scores: the gradient vanishes where scores are far apart relative to tau.

    Args:
        tau: Temperature of the comparison.
        gain: ``"exponential"``, 2^y - 1, or ``"linear"``, y. None = by the kind of labels: exponential for grades
            (the default), linear for places (such as RecFlow's 29..20).
        k: Cut-off of NDCG@k; None = no cut-off.
        options: See `RankingLoss`.

    Example:
        >>> ApproxNDCGLoss(tau=0.1)(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.3691)
    """

    name, label_kind, family, cost = "approx_ndcg", "graded", "listwise", "n^2"
    takes_item_weights = True
    paper = "Qin et al. 2010, Information Retrieval 13(4)"

    def __init__(self, tau: float = 1.0, gain: Gain | None = None, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.tau = check_positive("tau", tau)
        given = None if gain is None else check_gain(gain)
        self.gain: Gain = self._by_labels("gain", given, grades="exponential", places="linear")

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        gains = normalised_gains(labels, self.gain, mask, k, weights)
        ranks = soft_ranks(scores, gains > 0 if k is None else mask, mask, self.tau, weights)
        achieved = discount(ranks, scores.dtype) * (gains if weights is None else gains * weights)
        if k is not None:
            achieved = achieved * self._membership(ranks, k, scores.detach(), mask, weights)
        return 1.0 - achieved.sum(-1)

    def _membership(
        self, ranks: Tensor, k: int | Tensor, scores: Tensor, mask: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return m, (B, N). The k-th and the next rank are found from the scores, in which ties are exact."""
        w = mask.to(ranks.dtype) if weights is None else weights
        total = w.sum(-1)
        wanted = torch.minimum(k.to(total.dtype) if isinstance(k, Tensor) else torch.full_like(total, k), total)
        proper = ((wanted > 0) & (wanted < (total if weights is None else (1.0 - SLACK) * total)))[:, None]
        if scores.shape[1] < 2:
            return (wanted > 0).to(ranks.dtype)[:, None]
        # Lists with k = 0 or k >= n are replaced by equal scores and ranks with k = 1. Their value is not used, and
        # their gradient is a finite number times 0.
        inner, valid, w = torch.where(proper, wanted[:, None], 1.0), mask | ~proper, torch.where(proper, w, 1.0)
        x, r = torch.where(proper, scores, 0.0), torch.where(proper, ranks, 0.0)
        if weights is None:
            pair = kth_pair(x, inner[:, 0].long(), valid)
        else:
            pair = weighted_pair(torch.where(valid, x, -math.inf), inner[:, 0], w)
        tied = [torch.where(valid & (x == boundary), w, 0.0) for boundary in pair]
        kept, cut = ((r * one).sum(-1, keepdim=True) / one.sum(-1, keepdim=True) for one in tied)
        p = torch.sigmoid((0.5 * (kept + cut) - r) / self.tau) * valid
        p = p * (inner / torch.maximum((p * w).sum(-1, keepdim=True), inner))
        return torch.where(proper, p, (wanted > 0).to(p.dtype)[:, None])
