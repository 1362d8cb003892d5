"""Sums over the pairs of a list in bounded memory, for the pairwise losses.

A pairwise loss has B N^2 terms. They are computed for a few lists at a time, and the gradient, which has a closed form,
is summed in the same pass. No tensor of size N^2 is kept for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.dispatch import under_transform
from recsys_topk.ops.losses.known_gradient import known_gradient
from recsys_topk.ops.losses.pair_spans import better_items, spans
from recsys_topk.ops.losses.pair_sums import PairWeights, count_pairs, pair_sums


def check_pairs(pairs: str) -> Literal["mean", "sum"]:
    """Return `pairs`, or raise unless it is 'mean' or 'sum'."""
    if pairs not in ("mean", "sum"):
        raise ValueError(f"pairs must be 'mean' or 'sum', got {pairs!r}")
    return "mean" if pairs == "mean" else "sum"


def pairwise_logistic(scores: Tensor, rows: Tensor, weight: Callable[[slice], Tensor], *, sigma: float = 1.0) -> Tensor:
    """Return sum over pairs of w_ij log(1 + exp(-sigma (x_i - x_j))) for each list, (B,).

    The weights are constants: no gradient flows through them. With s the logistic function,
    dL/dx_i = sigma (sum_j w_ji s(-sigma (x_j - x_i)) - sum_j w_ij s(-sigma (x_i - x_j))).

    Args:
        scores: (B, N).
        rows: (B, P), the indices of the items i (see `better_items`); j runs over all items.
        weight: A function from a slice of b lists to the weights w_ij >= 0, (b, P, N); 0 if (i, j) is not a pair.
        sigma: Steepness.
    """

    def formula(x: Tensor) -> Tensor:
        z = sigma * (x.gather(1, rows)[:, :, None] - x[:, None, :])
        return -(F.logsigmoid(z) * weight(slice(None))).sum((1, 2))

    if under_transform():
        return formula(scores)
    x = scores.detach()
    head = x.gather(1, rows)
    wants_gradient = torch.is_grad_enabled() and scores.requires_grad
    # Results are written to preallocated tensors. Small tensors allocated in the loop would lie between the large
    # buffers that are freed, and the allocator could not reuse the space.
    value, gradient = x.new_empty(x.shape[0]), torch.empty_like(x)
    for span in spans(x, rows):
        z = head[span, :, None] - x[span, None, :]
        if sigma != 1.0:
            z = z * sigma
        w = weight(span)
        value[span] = -(F.logsigmoid(z) * w).sum((1, 2))
        if wants_gradient:
            pull = torch.sigmoid(-z) * w
            gradient[span] = pull.sum(1).scatter_add(1, rows[span], -pull.sum(2))
    if not wants_gradient:
        return value
    return known_gradient(scores, value, gradient if sigma == 1.0 else gradient * sigma, formula)


def weighted_pairs(scores: Tensor, weights: PairWeights, rows: Callable[[], Tensor], *, sigma: float = 1.0) -> Tensor:
    """Return the result of `pairwise_logistic`, computed by a compiled loop if one is available.

    Args:
        scores: (B, N).
        weights: The weights.
        rows: A function that returns the indices of the items i, (B, P). It is called only if they are needed.
        sigma: Steepness.
    """
    if pair_sums.backend_for(scores, weights, sigma) != "torch":
        return pair_sums(scores, weights, sigma)
    chosen = rows()
    return pairwise_logistic(scores, chosen, lambda span: weights.block(span, chosen), sigma=sigma)


class LabelOrder:
    """The pairs of a list whose first item has the larger label.

    Args:
        labels: (B, N).
        mask: Boolean (B, N).
        candidate: Boolean (B, N), which items may be the first item of a pair; None = all.
        item_weights: (B, N); None = 1. An item of weight w counts as w copies.
    """

    def __init__(
        self, labels: Tensor, mask: Tensor, candidate: Tensor | None = None, item_weights: Tensor | None = None
    ) -> None:
        lowest = (labels if is_full(mask) else torch.where(mask, labels, math.inf)).amin(-1, keepdim=True)
        beats = labels > lowest if is_full(mask) else mask & (labels > lowest)
        self.candidate = beats if candidate is None else beats & candidate
        self.mask, self.item_weights = mask, item_weights
        self._labels = labels
        self._rows: Tensor | None = None

    @property  # torch.compile does not trace the lock of a cached_property
    def rows(self) -> Tensor:
        """Indices that include all items with a larger label than some other item, (B, P); computed on first use."""
        if self._rows is None:
            self._rows = better_items(self.candidate)
        return self._rows

    def weights(self, values: Tensor, kind: Literal["ones", "differences"], **rest: Any) -> PairWeights:
        """Return the pair weights for values that increase with the label. For `rest` see `PairWeights`."""
        first, second = torch.where(self.candidate, values, -math.inf), self._second(values)
        return PairWeights(first, second, kind, **rest, items=self.item_weights)

    def loss(self, scores: Tensor, weights: PairWeights, sigma: float, pairs: str) -> Tensor:
        """Return the ``"sum"`` or the ``"mean"`` of the logistic losses of the weighted pairs of each list, (B,)."""
        total = weighted_pairs(scores, weights, lambda: self.rows, sigma=sigma)
        if pairs == "sum":
            return total
        count = self.count()
        return total / torch.where(count > 0, count, 1)

    def count(self) -> Tensor:
        """Return the number of pairs of each list, (B,)."""
        first = torch.where(self.candidate, self._labels, -math.inf)
        return count_pairs(first, self._second(self._labels), self.item_weights)

    def blocks(self, values: Tensor, kind: Literal["ones", "differences"]) -> Callable[[slice], Tensor]:
        """Return a function from a slice of lists to the pair weights for values, (b, P, N)."""
        weights = self.weights(values, kind)
        return lambda span: weights.block(span, self.rows)

    def _second(self, values: Tensor) -> Tensor:
        return values if is_full(self.mask) else torch.where(self.mask, values, math.inf)
