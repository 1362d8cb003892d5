"""ARF (adaptive neural ranking): a relaxed recall at the stage's quota plus a global sorting term."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.losses.arf_terms import arf_terms, neuralsort_matrix, relaxed_recall
from recsys_topk.ops.losses.topk_target import topk_target

__all__ = ["ARFLoss", "ARFV2Loss", "neuralsort_matrix", "relaxed_recall"]

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

    Item weights are not supported: a list of weighted items would have as many rows as its weights sum to, and the sum
    need not be an integer.

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
    two_sided = False
    no_item_weights = ", because its relaxed permutation has one row per item, and weights need not sum to an integer"
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
        given = (scores, labels, mask, target, quota)
        options = (self.tau, self.eps, self.two_sided)
        if arf_terms.backend_for(*given, *options) != "torch":
            return self._weighted(*arf_terms(*given, *options).unbind())
        size = max(1, (GROUP_ON_CPU if may_read(scores) else GROUP) // (n * n))
        parts: list[Tensor] = []
        for start in range(0, rows, size):
            group: list[Tensor] = [t[start : start + size] for t in given]
            part: Any = self._terms(*group) if rows <= size else checkpoint(self._terms, *group, use_reentrant=False)
            parts.append(part)
        return self._weighted(*torch.cat(parts, 1).unbind())

    def _weighted(self, relax: Tensor, order: Tensor) -> Tensor:
        return relax + 0.5 * torch.exp(-self.log_variance) * order + 0.5 * self.log_variance

    def _terms(self, scores: Tensor, labels: Tensor, mask: Tensor, target: Tensor, quota: Tensor) -> Tensor:
        """Return L_relax and L_global of each list, (2, B), in torch."""
        return arf_terms.reference(scores, labels, mask, target, quota, self.tau, self.eps, self.two_sided)


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
    two_sided = True
    paper = "LCRON, arXiv 2503.09492 (ARF-v2)"
