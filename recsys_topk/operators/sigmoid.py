"""Sigmoid top-k: a logistic membership with the threshold at which it sums to k exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.losses.topk_loss import Law
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.from_threshold import from_threshold
from recsys_topk.ops.selection.logistic import logistic_logs, logistic_threshold


class SigmoidTopK(TopKOperator):
    """Logistic membership around the threshold at which it sums to k: DFTopK with an exact sum.

    p_i = sigmoid((x_i - b) / tau), b solves sum_i p_i = k. Newton's method finds b in a few passes, O(N) each; the
    gradient follows from the implicit function theorem, db/dx_i = p_i (1 - p_i) / sum_j p_j (1 - p_j).

    Args:
        tau: Temperature.
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> SigmoidTopK()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.8180, 0.3780, 0.6220, 0.1820]])
    """

    name, cost = "sigmoid", "n"
    paper = "the strict form of DFTopK; equal to two-anchor entropic transport (Xie et al. 2020)"

    def law(self) -> Law:
        """See `TopKOperator.law`."""
        return Law("logistic", self.tau)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        return sigmoid_selection(scores, k, mask, torch.full_like(scores[:, :1], self.tau))


def sigmoid_selection(scores: Tensor, k: int | Tensor, mask: Tensor, tau: Tensor) -> SoftSelection:
    """Return the logistic membership that sums to k, with one temperature per list.

    Args:
        scores: (B, N), 0 where masked.
        k: One int, or (B,), with 1 <= k < number of valid items.
        mask: Boolean (B, N).
        tau: (B, 1), positive; a constant for the gradient.
    """
    filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
    ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
    x, gap = centred(filled, ks)
    tau = tau.detach()
    z = from_threshold(x, logistic_threshold(x.detach(), gap, ks, tau), tau, "logistic")
    return SoftSelection(*logistic_logs(z), mask)
