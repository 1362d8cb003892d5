"""Which item follows which in users' sequences: counts, and their look-up for pairs of items. No parameters."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from recsys_topk.types import Array


def count_pairs(user: Array, item: Array, size: int, gaps: int) -> tuple[Array, Array, Array]:
    """Return which item follows which, and how often: items i, items j and c(i, j), ordered by i and j.

    c(i, j) = sum of 1 / gap over all pairs in which j follows i in a user's sequence at a distance of at most `gaps`.

    Args:
        user: (n,) integers, equal for the interactions of one user, which are adjacent.
        item: (n,) the item of each interaction, in the order of time, below `size`.
        size: Number of items.
        gaps: Largest distance.

    Example:
        >>> [x.tolist() for x in count_pairs(np.array([0, 0, 0]), np.array([1, 2, 0]), 3, 2)]
        [[1, 1, 2], [0, 2, 0], [0.5, 1.0, 1.0]]
    """
    pairs, weights = [np.empty(0, np.int64)], [np.empty(0)]
    for gap in range(1, gaps + 1):
        same = user[gap:] == user[:-gap]
        gap_pairs, number = np.unique(item[:-gap][same] * size + item[gap:][same], return_counts=True)
        pairs.append(gap_pairs)
        weights.append(number / gap)
    pair, pair_index = np.unique(np.concatenate(pairs), return_inverse=True)
    return pair // size, pair % size, np.bincount(pair_index, np.concatenate(weights), pair.size)


class Successors(nn.Module):
    """The M most frequent successors of each item, as buffers of fixed size.

    The counts c(i, j) are those of `count_pairs`. Memory: 8 V M bytes. Cost of a look-up: O(log M).

    Args:
        size: Number of items, V.
        most: Number of successors that are kept per item, M.
        gaps: Largest distance of two items in a sequence.
        damping: Counts are divided by (1 + total count of the successor) ** damping in `shares`.

    Example:
        >>> successors = Successors(4, gaps=1)
        >>> successors.count(np.array([0, 0, 0, 1, 1]), np.array([1, 2, 3, 1, 2]))
        >>> successors(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))
        tensor([[[2., 0.],
                 [0., 1.]]])
    """

    following: Tensor
    counts: Tensor
    totals: Tensor
    damps: Tensor

    def __init__(self, size: int, most: int = 256, gaps: int = 5, damping: float = 0.3) -> None:
        super().__init__()
        if min(size, most, gaps) < 1:
            raise ValueError(f"size, most and gaps must be at least 1, got {size}, {most} and {gaps}")
        self.size, self.most, self.gaps, self.damping = size, min(most, size), gaps, damping
        self.register_buffer("following", torch.full((size, self.most), size, dtype=torch.int32))
        self.register_buffer("counts", torch.zeros(size, self.most))
        self.register_buffer("totals", torch.zeros(size))
        self.register_buffer("damps", torch.ones(size))

    def count(self, user: Array, item: Array) -> None:
        """Count pairs of items. Earlier counts are lost.

        Args:
            user: (n,) integers, equal for the interactions of one user, which are adjacent.
            item: (n,) the item of each interaction, in the order of time.
        """
        before, after, weight = count_pairs(user, item, self.size, self.gaps)
        damp = (1 + np.bincount(after, weight, self.size)) ** self.damping
        # The most frequent successors of each item, and among them ascending items.
        order = np.lexsort((after, -weight, before))
        rank = np.arange(order.size) - np.searchsorted(before[order], before[order])
        kept = np.sort(order[rank < self.most])
        column = np.arange(kept.size) - np.searchsorted(before[kept], before[kept])
        following = np.full((self.size, self.most), self.size, np.int32)
        counts = np.zeros((self.size, self.most), np.float32)
        following[before[kept], column] = after[kept]
        counts[before[kept], column] = weight[kept]
        totals = np.bincount(before, weight / damp[after], self.size)
        for name, array in (("following", following), ("counts", counts), ("totals", totals), ("damps", damp)):
            getattr(self, name).copy_(torch.from_numpy(np.asarray(array)))

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Return c(before_j, after_n), (B, J, N).

        Args:
            before: (B, J) items.
            after: (B, N) items.
        """
        start = (before * self.most)[:, :, None]
        target = after[:, None]
        following = self.following.flatten()
        low = torch.zeros_like(start + target)
        high = torch.full_like(low, self.most)
        for _ in range(math.ceil(math.log2(self.most + 1))):  # binary search in the row of `before`
            middle = (low + high) // 2
            less = following[start + middle.clamp_max(self.most - 1)] < target
            low, high = torch.where(less & (middle < high), middle + 1, low), torch.where(less, high, middle)
        position = start + low.clamp_max(self.most - 1)
        return torch.where((following[position] == target) & (low < self.most), self.counts.flatten()[position], 0.0)

    def shares(self, before: Tensor, after: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the damped share of each item among the successors of weighted items, and c of the first one, (B, N).

        Args:
            before: (B, J) items.
            after: (B, N) items.
            weights: (B, J) weights of the items, 0 = padding.
        """
        counts = self(before, after)
        totals = (self.totals[before] * weights).sum(1, keepdim=True)
        damped = torch.bmm(weights[:, None], counts).squeeze(1) / self.damps[after]
        return damped / totals.clamp_min(1e-6), counts[:, 0]
