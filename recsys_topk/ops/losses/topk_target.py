"""The items that truly are in the top k of their list."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.dispatch import is_real, operation
from recsys_topk.ops.selection.kth_pair import Array, Bools, pair_numpy


def topk_target(labels: Tensor, mask: Tensor, k: int | Tensor, positive_above: float = 0.0) -> Tensor:
    """Return which items truly are in the top k, as 0/1 in the dtype of `labels`, (B, N).

    y_i = 1 if item i is valid, positive, and its label is >= the k-th largest valid label of its list. Labels tied
    at the boundary are all in, so that the target does not depend on the order of the items.

    Example:
        >>> topk_target(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), 2)
        tensor([[1., 0., 0., 1.]])
    """
    positive = labels > positive_above
    return best_positives(labels, positive if is_full(mask) else positive & mask, k, None).to(labels.dtype)


@operation
def best_positives(labels: Tensor, positive: Tensor, k: int | Tensor, positives: Tensor | None) -> Tensor:
    """Return which positive items are in the top k of their list by label, ties at the boundary included, (B, N) bool.

    Args:
        labels: (B, N).
        positive: Boolean (B, N), the valid positive items.
        k: One int, or one int per list, (B,).
        positives: (B,), the number of positives, if known.
    """
    index = k[:, None] if isinstance(k, Tensor) else torch.full((labels.shape[0], 1), k, device=labels.device)
    if not labels.shape[1]:
        return positive
    ordered = torch.where(positive, labels, -math.inf).sort(-1, descending=True).values
    boundary = ordered.gather(1, (index - 1).clamp(0, labels.shape[1] - 1))
    return positive & (labels >= boundary) & (index > 0)


@best_positives.backend("numpy", lambda labels, positive, k, positives: is_real(labels) and is_real(positive))
def _numpy(labels: Tensor, positive: Tensor, k: int | Tensor, positives: Tensor | None) -> Tensor:
    counts = None if positives is None else positives.numpy()
    return torch.from_numpy(_best_numpy(labels.detach().numpy(), positive.numpy(), k, counts))


def _best_numpy(labels: Array, positive: Bools, k: int | Tensor, positives: Array | None) -> Bools:
    """Return which positive items are in the top k; `positive` itself if no list has more than k positives.

    Labels are compared only in lists with more positives than k, and only if they differ. Binary labels thus cost one
    pass that counts.
    """
    ks: Array | int = k.numpy() if isinstance(k, Tensor) else k
    target: Bools = positive
    crowded = (positive.sum(1) if positives is None else positives) > ks
    if not crowded.any():
        return target
    values = labels[positive]
    if values.min() == values.max():  # binary labels: all positives are tied at the boundary
        return target if np.min(ks) > 0 else target & (np.reshape(ks, (-1, 1)) > 0)
    rows = np.flatnonzero(crowded)
    wanted = ks[rows] if isinstance(ks, np.ndarray) else np.full(rows.size, ks)
    inside = np.where(positive[rows], labels[rows], -np.inf).astype(labels.dtype, copy=False)
    boundary, _ = pair_numpy(inside, np.maximum(wanted, 1))
    target = positive.copy()
    target[rows] &= (labels[rows] >= boundary[:, None]) & (wanted > 0)[:, None]
    return target
