"""Smooth top-k: the probability that an item is in a random subset of k items."""

from __future__ import annotations

from torch import Tensor

from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.selection.subsets import subset_logs


class SmoothTopK(TopKOperator):
    """Inclusion probability in a random k-subset whose weight is exp(sum of its scores / tau).

    p_i = exp(x_i / tau) e_{k-1}(without i) / e_k, e_j the j-th elementary symmetric polynomial of exp(x / tau). This is
    the gradient of tau log e_k, the smooth maximum over all k-subsets. Among all distributions over k-subsets with the
    same memberships, this one has the largest entropy.

    Cost: O(k N) time and memory, in O(log N) steps. On devices other than the CPU, one k per list costs as much as
    k = N.

    Args:
        tau: Temperature.
        options: See `TopKOperator`.

    Example:
        >>> import torch
        >>> SmoothTopK()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.8810, 0.3060, 0.6940, 0.1190]])
    """

    name, cost = "smooth_topk", "k n"
    paper = "Berrada et al. 2018, arXiv 1802.07595"

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        return SoftSelection(*subset_logs(scores / self.tau, k, mask), mask)
