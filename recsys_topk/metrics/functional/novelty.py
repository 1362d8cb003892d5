"""How well known the items of a list are."""

from __future__ import annotations

import torch
from torch import Tensor


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
