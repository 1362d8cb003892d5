"""LapSum: a Laplace membership that sums to k exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.losses.topk_loss import Law
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import kth_values
from recsys_topk.ops.selection.laplace import laplace_logs, laplace_threshold


class LapSum(TopKOperator):
    """Laplace membership around the threshold at which it sums to k.

    p_i = F((x_i - b) / tau), F the distribution function of the standard Laplace law, b solves sum_i p_i = k. With
    e_i = exp(-|x_i - b| / tau) the gradient of the threshold is db/dx_i = e_i / sum_j e_j. The threshold is found
    without a sort, in two to four passes over the list, O(N) each (see `laplace_threshold`). k may be a fraction.

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
    paper = "Struski et al. 2025, arXiv 2503.06242"

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("laplace", self.tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
        ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
        x, gap = _centred_at_fraction(filled, ks) if ks.is_floating_point() else centred(filled, ks)
        return SoftSelection(*laplace_logs(x, laplace_threshold(x.detach(), gap, ks, self.tau), self.tau), mask)


def _centred_at_fraction(filled: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores minus the partly selected score, x_[m + 1] for m < k < m + 1, and the gap 0.

    For an integer k no item is partly selected, and the result is that of `centred`.
    """
    whole = k.long()
    kept, cut = kth_values(filled, whole.clamp_min(1))
    partial = torch.where(whole[:, None] > 0, cut, kept)
    return filled - partial, torch.where((k == whole)[:, None], kept - cut, 0.0)
