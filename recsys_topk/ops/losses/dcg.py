"""The parts of (N)DCG that losses and metrics share: gains of labels, discounts of ranks, the ideal DCG."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from recsys_topk.ops.selection.sorting import sorted_descending

Gain = Literal["linear", "exponential"]
LogBase = Literal["2", "e"]


def check_gain(gain: str) -> Gain:
    """Return `gain`. Raise if it is unknown."""
    if gain == "linear":
        return "linear"
    if gain == "exponential":
        return "exponential"
    raise ValueError(f"gain must be 'linear' (g = y) or 'exponential' (g = 2^y - 1), got {gain!r}")


def gains(labels: Tensor, gain: Gain) -> Tensor:
    """Return g(y) = y (linear) or 2^y - 1 (exponential), the shape of `labels`.

    Use the exponential gain for small grades, e.g. 0 to 4. A label of 29 has a gain of half a billion.

    Example:
        >>> gains(torch.tensor([0.0, 1.0, 3.0]), "exponential")
        tensor([0., 1., 7.])
    """
    return labels if gain == "linear" else torch.exp2(labels) - 1.0


def discount(ranks: Tensor, dtype: torch.dtype, base: float = 2.0) -> Tensor:
    """Return D(r) = 1 / log(1 + r) in the given base, for ranks r >= 1.

    Example:
        >>> discount(torch.tensor([1, 3]), torch.float32)
        tensor([1.0000, 0.5000])
    """
    return math.log(base) / torch.log1p(ranks.to(dtype))


def rank_discounts(n: int, k: int | Tensor | None, like: Tensor, base: float = 2.0) -> Tensor:
    """Return D(1), ..., D(n) with 0 after rank k: (n,), or (B, n) for one k per list."""
    ranks = torch.arange(1, n + 1, device=like.device)
    values = discount(ranks, like.dtype, base)
    if k is None:
        return values
    return torch.where(ranks <= (k[:, None] if isinstance(k, Tensor) else k), values, 0.0)


def ideal_dcg(label_gains: Tensor, k: int | Tensor | None = None, base: float = 2.0) -> Tensor:
    """Return the DCG of the best order, sum over the first k of g_[r] D(r), (B,).

    Args:
        label_gains: (B, N), 0 where masked.
        k: Number of ranks that count, an int or one int per list; None = all.
        base: Base of the logarithm.
    """
    ordered = sorted_descending(label_gains)
    return (ordered * rank_discounts(label_gains.shape[-1], k, label_gains, base)).sum(-1)


def normalised_gains(labels: Tensor, gain: Gain, mask: Tensor, k: int | Tensor | None = None) -> Tensor:
    """Return g(y_i) / ideal DCG@k of each list, (B, N); 0 where masked, and in lists whose ideal DCG is 0.

    Exponential gains are computed relative to the largest label of the list, so that they cannot overflow. This does
    not change the quotient.

    Example:
        >>> normalised_gains(torch.tensor([[200.0, 0.0]]), "exponential", torch.ones(1, 2, dtype=torch.bool))
        tensor([[1., 0.]])
    """
    if gain == "exponential":
        top = labels.amax(-1, keepdim=True)
        labels = torch.exp2(labels - top) - torch.exp2(-top)
    values = torch.where(mask, labels, 0.0)
    ideal = ideal_dcg(values, k)[:, None]
    return torch.where(ideal > 0, values / torch.where(ideal > 0, ideal, 1.0), 0.0)
