"""How recommendations are spread over the items of a catalogue."""

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
