"""Metrics beyond accuracy: exposure of the catalogue, popularity and novelty of the items, diversity of the lists."""

from __future__ import annotations

import torch
from torch import Tensor


def catalogue_coverage(exposure: Tensor) -> Tensor:
    """Return the share of the items that were recommended at least once, a float64 scalar.

    Args:
        exposure: (C,), how often each item of the catalogue was recommended.

    Example:
        >>> catalogue_coverage(torch.tensor([3, 0, 1, 0]))
        tensor(0.5000, dtype=torch.float64)
    """
    return (exposure > 0).double().mean()


def gini(exposure: Tensor) -> Tensor:
    """Return the Gini coefficient of the exposure, a float64 scalar: 0 = equal for all items, near 1 = one item only.

    With the exposures in ascending order, G = sum_i (2 i - C - 1) x_i / (C sum_i x_i). It is NaN if nothing was
    recommended. Cost: O(C log C).

    Args:
        exposure: (C,), how often each item of the catalogue was recommended.

    Example:
        >>> gini(torch.tensor([2, 2])), gini(torch.tensor([0, 0, 0, 5]))
        (tensor(0., dtype=torch.float64), tensor(0.7500, dtype=torch.float64))
    """
    x = exposure.double().sort().values
    number = x.numel()
    weights = 2 * torch.arange(1, number + 1, dtype=torch.float64, device=x.device) - number - 1
    return (weights * x).sum() / (number * x.sum())


def mean_popularity(counts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean count of the items of each list.

    The popularity lift of a recommender (Abdollahpouri et al. 2019) is the mean of this value over the recommended
    lists, divided by the mean over the users' histories, minus 1.

    Args:
        counts: (B, N), how often each item occurs in the training data.
        mask: Boolean (B, N), True = a real item.

    Returns:
        The mean, float64 (B,), and which lists have an item, boolean (B,).

    Example:
        >>> mean_popularity(torch.tensor([[3, 1, 9]]), torch.tensor([[True, True, False]]))
        (tensor([2.], dtype=torch.float64), tensor([True]))
    """
    number = mask.sum(1)
    return torch.where(mask, counts, 0).double().sum(1) / number.clamp_min(1), number > 0


def mean_novelty(counts: Tensor, mask: Tensor, *, users: int) -> tuple[Tensor, Tensor]:
    """Return the mean of -log2(count / users) over the items of each list (mean inverse user frequency).

    0 = every user had all items. An item without a user counts as an item with one user.

    Args:
        counts: (B, N), number of users who had each item in the training data.
        mask: Boolean (B, N), True = a real item.
        users: Number of users in the training data.

    Returns:
        The novelty, float64 (B,), and which lists have an item, boolean (B,).

    Example:
        >>> mean_novelty(torch.tensor([[8, 2]]), torch.tensor([[True, True]]), users=8)
        (tensor([1.], dtype=torch.float64), tensor([True]))
    """
    return mean_popularity(-torch.log2(counts.clamp_min(1).double() / users), mask)


def intra_list_diversity(values: Tensor, present: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean distance of all pairs of items of each list.

    The distance of two items is 1 - |A ∩ B| / |A ∪ B|, where A and B are their sets of values (Jaccard). For a feature
    with one value it is 1 if the values differ, else 0. Two items without values have distance 0. A list with one item
    has diversity 0. Cost: O(B N^2 S^2); memory: O(B N^2).

    Args:
        values: (B, N, S), the values of a feature of each item.
        present: Boolean (B, N, S), False = padding.
        mask: Boolean (B, N), True = a real item.

    Returns:
        The diversity, float64 (B,), and which lists have an item, boolean (B,).

    Example:
        >>> genres = torch.tensor([[[1, 2], [1, 0], [3, 0]]])
        >>> intra_list_diversity(genres, genres > 0, torch.ones(1, 3, dtype=torch.bool))
        (tensor([0.8333], dtype=torch.float64), tensor([True]))
    """
    slots = range(values.shape[2])
    present = present.clone()
    for s in slots:  # a value that occurs twice counts once
        for t in range(s):
            present[..., s] &= ~(present[..., t] & (values[..., s] == values[..., t]))
    common = torch.zeros((*mask.shape, mask.shape[1]), dtype=torch.float64, device=mask.device)
    for s in slots:
        for t in slots:
            both = present[:, :, None, s] & present[:, None, :, t]
            common += both & (values[:, :, None, s] == values[:, None, :, t])
    size = present.sum(2).double()
    union = size[:, :, None] + size[:, None, :] - common
    distance = torch.where(union > 0, 1 - common / union.clamp_min(1), 0.0)
    pairs = (mask[:, :, None] & mask[:, None, :]).triu(1)
    number = mask.sum(1)
    total = torch.where(pairs, distance, 0.0).sum((1, 2))
    return total / pairs.sum((1, 2)).clamp_min(1), number > 0
