"""ARF (adaptive neural ranking): a relaxed recall at the stage's quota plus a global sorting term."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.losses.topk_target import topk_target

# Lists are processed in groups whose relaxed permutations have about this many entries in total. The backward pass
# recomputes each group. On a CPU a group should stay near its cache (measured fastest).
GROUP = 2**24
GROUP_ON_CPU = 2**19


class ARFLoss(RankingLoss):
    """Relaxed recall of the true items at a quota of k, plus the cross-entropy of the whole order.

    With P the NeuralSort matrix of the scores (rows are ranks) and P* the permutation of the labels (tied labels
    share their ranks evenly): L_relax = mean_i -y_i log(mean_{r <= k} P_ri + eps), L_global = mean_{r,i} -P*_ri
    log(P_ri + eps), and L = L_relax + exp(-w) L_global / 2 + w / 2 with w the learned `log_variance`. It starts at 0
    and is trained only if it is passed to the optimizer. O(n^2) time.

    Args:
        tau: Temperature of NeuralSort.
        top: Number of true items, by label; None = all positive items.
        eps: Added inside each logarithm, as published.
        k: The quota, the number of items that the stage passes on; required here or in the call.
        options: See `RankingLoss`.

    Example:
        >>> loss = ARFLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])).detach()
        tensor(1.8706)
    """

    name, label_kind, family, cost = "arf", "graded", "top-k", "n^2"
    requires_k = True
    stage_k = "quota"
    paper = "Wang et al. 2024, arXiv 2310.10462 (ARF)"

    def __init__(
        self, tau: float = 1.0, top: int | None = None, eps: float = 1e-6, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise ValueError(f"top must be a positive int or None, got {top!r}")
        self.tau, self.top, self.eps = check_positive("tau", tau), top, check_positive("eps", eps)
        self.log_variance = nn.Parameter(torch.zeros(()))

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        rows, n = scores.shape
        target = topk_target(labels, mask, n if self.top is None else self.top, self.positive_above)
        quota = k if isinstance(k, Tensor) else torch.full((rows,), k, device=scores.device)
        size = max(1, (GROUP_ON_CPU if may_read(scores) else GROUP) // (n * n))
        parts: list[Tensor] = []
        for start in range(0, rows, size):
            group: list[Tensor] = [t[start : start + size] for t in (scores, labels, mask, target, quota)]
            part: Any = self._terms(*group) if rows <= size else checkpoint(self._terms, *group, use_reentrant=False)
            parts.append(part)
        return self._weighted(*torch.cat(parts, 1).unbind())

    def _weighted(self, relax: Tensor, order: Tensor) -> Tensor:
        return relax + 0.5 * torch.exp(-self.log_variance) * order + 0.5 * self.log_variance

    def _terms(self, scores: Tensor, labels: Tensor, mask: Tensor, target: Tensor, quota: Tensor) -> Tensor:
        """Return L_relax and L_global of each list, (2, B)."""
        n = mask.sum(1)
        ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        p = neuralsort_matrix(scores, mask, n, ranks, self.tau)
        relax = self._relax(p, (target, 1.0 - target), mask, ranks[:, None] <= quota[:, None, None], quota, n)
        # Tied labels occupy ranks ahead + 1 .. ahead + size and get a share of 1 / size of each.
        both = mask[:, :, None] & mask[:, None, :]
        ahead = (both & (labels[:, :, None] < labels[:, None, :])).sum(2)
        size = (both & (labels[:, :, None] == labels[:, None, :])).sum(2).clamp_min(1)
        inside = (ranks[:, None] > ahead[:, None, :]) & (ranks[:, None] <= (ahead + size)[:, None, :])
        share = (inside & mask[:, None, :]) / size[:, None, :].to(p.dtype)
        order = -(share * torch.log(p + self.eps)).sum((1, 2)) / (n * n)
        return torch.stack((relax, order))

    def _relax(
        self, p: Tensor, shares: tuple[Tensor, Tensor], mask: Tensor, first: Tensor, quota: Tensor, n: Tensor
    ) -> Tensor:
        share = torch.where(first, p, 0.0).sum(1) / quota[:, None]
        return -(shares[0] * torch.log(share + self.eps)).sum(1) / n


class ARFV2Loss(ARFLoss):
    """ARF with the relaxed recall replaced by LCRON's two-sided term.

    L_relax = mean_i -(y_i log(U_i / (C_i + eps) + eps) + (1 - y_i) log(D_i / (C_i + eps) + eps)), U the mass of item i
    in the first k rows of NeuralSort, D in the other rows, C = U + D held constant. The other terms are those of
    `ARFLoss`. O(n^2) time.

    Args:
        eps: Added inside each logarithm and to C, as published.
        options: See `ARFLoss`.

    Example:
        >>> loss = ARFV2Loss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])).detach()
        tensor(1.9425)
    """

    name = "arf_v2"
    exact_gradient = False  # the column sums are held constant
    paper = "LCRON, arXiv 2503.09492 (ARF-v2)"

    def _relax(
        self, p: Tensor, shares: tuple[Tensor, Tensor], mask: Tensor, first: Tensor, quota: Tensor, n: Tensor
    ) -> Tensor:
        up, down = torch.where(first, p, 0.0).sum(1), torch.where(first, 0.0, p).sum(1)
        total = (up + down).detach() + self.eps
        terms = shares[0] * torch.log(up / total + self.eps) + shares[1] * torch.log(down / total + self.eps)
        return -torch.where(mask, terms, 0.0).sum(1) / n


def neuralsort_matrix(scores: Tensor, mask: Tensor, n: Tensor, ranks: Tensor, tau: float) -> Tensor:
    """Return the NeuralSort matrix, (B, rank, item); 0 for masked items and ranks above the number of valid items."""
    x = torch.where(mask, scores - scores.sum(1, keepdim=True).detach() / n[:, None], 0.0)
    distance = torch.where(mask[:, None, :], (x[:, :, None] - x[:, None, :]).abs(), 0.0).sum(2)
    slope = (n[:, None] + 1 - 2 * ranks).to(x.dtype)
    logits = (slope[:, :, None] * x[:, None, :] - distance[:, None, :]) / tau
    logits = torch.where(mask[:, None, :], logits, -math.inf)
    return torch.where(mask[:, None, :] & (ranks <= n[:, None])[:, :, None], torch.softmax(logits, 2), 0.0)
