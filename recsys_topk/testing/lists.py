"""The test lists of the contract suite, and transformations of lists that must not change the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Values of padding that must have no effect.
JUNK_SCORES = (math.nan, math.inf, -math.inf, 1e30)
JUNK_LABEL = 9.0


@dataclass(frozen=True)
class Lists:
    """A batch of test lists.

    Attributes:
        scores: (B, N), any floating dtype.
        labels: (B, N), finite and >= 0.
        mask: Boolean (B, N).
        k: How many items to select.

    Example:
        >>> lists = Lists(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), k=1)
        >>> print(lists)
        scores=[[0.0, 0.0]] (float32) labels=[[1.0, 1.0]] mask=[[1, 1]] k=1
    """

    scores: Tensor
    labels: Tensor
    mask: Tensor
    k: int

    def __str__(self) -> str:
        if self.scores.numel() > 80:
            return f"lists of shape {tuple(self.scores.shape)} ({self._dtype}) k={self.k}"
        return (
            f"scores={self.scores.tolist()} ({self._dtype}) labels={self.labels.tolist()} "
            f"mask={self.mask.int().tolist()} k={self.k}"
        )

    @property
    def _dtype(self) -> str:
        return str(self.scores.dtype).removeprefix("torch.")

    def to(self, dtype: torch.dtype) -> Lists:
        """Return the same lists with scores of another dtype."""
        return replace(self, scores=self.scores.to(dtype))

    def with_scores(self, scores: Tensor) -> Lists:
        """Return the same lists with other scores."""
        return replace(self, scores=scores)

    def rows(self, index: Tensor) -> Lists:
        """Return the lists at the given indices."""
        return replace(self, scores=self.scores[index], labels=self.labels[index], mask=self.mask[index])

    def columns(self, index: Tensor) -> Lists:
        """Return every list with its items in the given order."""
        return replace(self, scores=self.scores[:, index], labels=self.labels[:, index], mask=self.mask[:, index])

    def and_rows(self, scores: Tensor, labels: Tensor, mask: Tensor) -> Lists:
        """Return these lists together with others of the same length."""
        return replace(
            self,
            scores=torch.cat([self.scores, scores.to(self.scores.dtype)]),
            labels=torch.cat([self.labels, labels.to(self.labels.dtype)]),
            mask=torch.cat([self.mask, mask]),
        )

    def with_junk(self, seed: int = 0) -> tuple[Lists, Tensor]:
        """Return the lists with masked items inserted between the real ones, and the columns of the real items, (N,).

        The real items keep their order, so that the result is the same for ties that are broken by position.
        """
        lists, n = self.scores.shape
        junk = torch.tensor(JUNK_SCORES, dtype=self.scores.dtype).expand(lists, -1)
        wide = replace(
            self,
            scores=torch.cat([self.scores, junk], 1),
            labels=torch.cat([self.labels, torch.full_like(junk, JUNK_LABEL).to(self.labels.dtype)], 1),
            mask=torch.cat([self.mask, torch.zeros_like(junk, dtype=torch.bool)], 1),
        )
        places = torch.randperm(n + len(JUNK_SCORES), generator=torch.Generator().manual_seed(seed), device="cpu")
        real = places[:n].sort().values
        return wide.columns(torch.cat([real, places[n:]]).argsort()), real

    def copies(self, weights: Tensor, row: int) -> tuple[Lists, Tensor]:
        """Return one list with `weights` copies of each item, without the others, and the columns of the copies."""
        columns = torch.repeat_interleave(torch.arange(weights.shape[1]), weights[row].long())
        return self.rows(torch.tensor([row])).columns(columns), columns

    def shuffled(self, seed: int = 0) -> tuple[Lists, Tensor]:
        """Return the lists with their items in a random order, and that order, (N,)."""
        order = torch.randperm(self.scores.shape[1], generator=torch.Generator().manual_seed(seed), device="cpu")
        return self.columns(order), order


def ordinary() -> Lists:
    """Return 3 lists of 7 items with distinct scores, graded labels, positives in every list, and no masked items."""
    scores = torch.tensor(
        [
            [0.31, -1.20, 0.87, 1.92, -0.45, 0.05, -2.10],
            [-0.73, 0.48, 1.11, -0.02, 2.35, -1.64, 0.66],
            [1.50, 0.21, -0.38, 0.94, -0.91, 0.58, -0.17],
        ],
        dtype=torch.float64,
    )
    labels = torch.tensor([[2, 0, 1, 0, 3, 0, 0], [0, 1, 0, 0, 0, 1, 0], [0, 0, 4, 3, 2, 1, 0]], dtype=torch.float64)
    return Lists(scores, labels, torch.ones_like(scores, dtype=torch.bool), k=3)


def ragged() -> Lists:
    """Return the ordinary lists with some masked items, also in the middle. Every list has more than k valid items."""
    full = ordinary()
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    return replace(full, mask=mask, k=2)


def short() -> Lists:
    """Return the ordinary lists cut to 4 items, for rules whose cost grows with the length (compilation)."""
    return replace(ordinary().columns(torch.tensor([0, 2, 4, 5])), k=2)


def short_ragged() -> Lists:
    """Return the short lists with one masked item in each."""
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
    return replace(short(), mask=mask, k=1)


def tied() -> Lists:
    """Return lists with ties at the k-th score, at other scores, and with all scores equal."""
    scores = torch.tensor(
        [[2.0, 1.0, 1.0, 1.0, 0.5, 0.5, -1.0], [0.0] * 7, [1.5, 1.5, 0.5, 0.5, 0.5, -0.5, -0.5]], dtype=torch.float64
    )
    return ordinary().with_scores(scores)


def extreme(sizes: Sequence[float] = (1e4, 1e30)) -> list[Lists]:
    """Return float32 lists with very large scores, scores far from 0, or scores very close together."""
    base = ordinary().to(torch.float32)
    signs = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.5, -0.25])
    return [base.with_scores(base.scores * 0 + signs * size) for size in sizes] + [
        base.with_scores(base.scores + 1e6),
        base.with_scores(base.scores * 1e-30),
    ]


def distinct(lists: Lists) -> bool:
    """Return whether all valid scores of each list are distinct."""
    tie = lists.scores[:, :, None] == lists.scores[:, None, :]
    pair = lists.mask[:, :, None] & lists.mask[:, None, :] & ~torch.eye(lists.scores.shape[1], dtype=torch.bool)
    return not bool((tie & pair).any())
