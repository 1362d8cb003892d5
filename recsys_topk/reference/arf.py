"""ARF and ARF-v2 with the published treatment of padding."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.losses.arf import ARFLoss, ARFV2Loss, neuralsort_matrix, relaxed_recall
from recsys_topk.losses.skipped_lists import count_lists


class PublishedARF(ARFLoss):
    """`ARFLoss` as published, with the same arguments. Padding must be at the end of the list.

    Differences from `ARFLoss`: padding takes part in P and P*, and its rows and columns are set to 0 afterwards; means
    divide by N; a list that is not longer than the quota has no L_relax; a list with padding has no L_global; no list
    is skipped.

    Example:
        >>> scores, labels = torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])
        >>> PublishedARF(k=2)(scores, labels).detach() == ARFLoss(k=2)(scores, labels)
        tensor(True)
    """

    def _measure(
        self, x: Tensor, y: Tensor, mask: Tensor | None, k: int | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if mask is None:
            return super()._measure(x, y, mask, k)
        cut, counted = count_lists(self, y, mask, k)
        return self._padded(x, y, mask, cut), counted

    def _padded(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        size, n = scores.shape
        quota = k if isinstance(k, Tensor) else torch.full((size,), k or n, device=scores.device)
        wanted = (
            (mask & (labels > self.positive_above)).sum(1) if self.top is None else torch.full_like(quota, self.top)
        )
        ranks, everyone = torch.arange(1, n + 1, device=scores.device), torch.ones_like(mask)
        all_items = everyone.sum(1)
        both = (mask[:, :, None] & mask[:, None, :]).to(scores.dtype)
        p = neuralsort_matrix(scores, everyone, all_items, ranks, self.tau) * both
        order = neuralsort_matrix(labels, everyone, all_items, ranks, 1e-4) * both
        best = ranks[:, None] <= wanted[:, None, None]
        shares = torch.where(best, order, 0.0).sum(1), torch.where(best, 0.0, order).sum(1)
        first = ranks[:, None] <= quota[:, None, None]
        relax = relaxed_recall(p, shares, mask, first, quota, all_items, self.eps, self.two_sided)
        whole = -(order * torch.log(p + self.eps)).sum((1, 2)) / (n * n)
        items = mask.sum(1)
        return self._weighted(torch.where(items > quota, relax, 0.0), torch.where(items >= n, whole, 0.0))

    def _reduce(self, losses: Tensor, counted: Tensor | None, weights: Tensor | None) -> Tensor:
        return super()._reduce(losses, None, weights)


class PublishedARFV2(PublishedARF, ARFV2Loss):
    """`ARFV2Loss` as published; see `PublishedARF`."""
