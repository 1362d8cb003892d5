"""How different the items of a list are from each other."""

from __future__ import annotations

import torch
from torch import Tensor


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
