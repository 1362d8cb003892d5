"""The parts of (N)DCG that losses and metrics share: gains of labels, discounts of ranks, the ideal DCG."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.dispatch import is_float32, operation
from recsys_topk.ops.selection.ranks import tie_ranks, weigh_lists, weights_above
from recsys_topk.ops.selection.sorting import sorted_descending

Gain = Literal["linear", "exponential"]
LogBase = Literal["2", "e"]


def check_gain(gain: str) -> Gain:
    """Return `gain`. Raise if it is unknown."""
    if gain not in ("linear", "exponential"):
        raise ValueError(f"gain must be 'linear' (g = y) or 'exponential' (g = 2^y - 1), got {gain!r}")
    return "linear" if gain == "linear" else "exponential"


def gains(labels: Tensor, gain: Gain) -> Tensor:
    """Return g(y) = y (linear) or 2^y - 1 (exponential), the shape of `labels`.

    Use the exponential gain for small grades, e.g. 0 to 4. A label of 29 has a gain of half a billion.

    Example:
        >>> gains(torch.tensor([0.0, 1.0, 3.0]), "exponential")
        tensor([0., 1., 7.])
    """
    return labels if gain == "linear" else torch.exp2(labels) - 1.0


def discount(ranks: Tensor, dtype: torch.dtype, base: float = 2.0, k: int | Tensor | None = None) -> Tensor:
    """Return D(r) = 1 / log(1 + r) in the given base, for ranks r >= 1; 0 after rank k, one int or one per list.

    Example:
        >>> discount(torch.tensor([1, 3]), torch.float32)
        tensor([1.0000, 0.5000])
    """
    values = math.log(base) / torch.log1p(ranks.to(dtype))
    return values if k is None else torch.where(ranks <= (k[:, None] if isinstance(k, Tensor) else k), values, 0.0)


def rank_discounts(n: int, k: int | Tensor | None, like: Tensor, base: float = 2.0) -> Tensor:
    """Return D(1), ..., D(n) with 0 after rank k: (n,), or (B, n) for one k per list."""
    return discount(torch.arange(1, n + 1, device=like.device), like.dtype, base, k)


def ideal_dcg(label_gains: Tensor, k: int | Tensor | None = None, base: float = 2.0) -> Tensor:
    """Return the DCG of the best order, sum over the first k of g_[r] D(r), (B,).

    Args:
        label_gains: (B, N), 0 where masked.
        k: Number of ranks that count, an int or one int per list; None = all.
        base: Base of the logarithm.
    """
    ordered = sorted_descending(label_gains)
    return (ordered * rank_discounts(label_gains.shape[-1], k, label_gains, base)).sum(-1)


EXACT = 4096  # ranks up to which sums of discounts are exact
GAUSS = np.polynomial.legendre.leggauss(20)  # nodes and weights of the quadrature of the rest


def discount_sums(amount: Tensor) -> Tensor:
    """Return D(1) + ... + D(t) for amounts t >= 0 of any shape, float64; a fraction of the next D for a fractional t.

    Beyond rank 4096 the sum is the integral of D from half a rank before to half a rank behind, which differs by less
    than 1e-7.
    """
    ranks = torch.arange(1, EXACT + 2, device=amount.device)
    values = discount(ranks, torch.float64)
    near = amount.double().clamp(0.0, EXACT)
    whole = near.long()
    sums = (values.cumsum(0) - values)[whole] + (near - whole) * values[whole]
    # With u = log(1 + r) the integral of D is that of log(2) exp(u) / u.
    start = math.log(EXACT + 1.5)
    length = (torch.log(amount.double().clamp_min(EXACT) + 1.5) - start)[..., None]
    nodes, weights = (torch.from_numpy(x).to(amount.device, non_blocking=True) for x in GAUSS)
    u = start + 0.5 * length * (1.0 + nodes)
    return sums + 0.5 * math.log(2.0) * (length * weights * torch.exp(u) / u).sum(-1)


def weighted_ideal_dcg(label_gains: Tensor, mask: Tensor, k: Tensor | None, weights: Tensor) -> Tensor:
    """Return the ideal DCG of lists with w copies of an item of weight w, (B,); see `ideal_dcg`."""
    ranks = tie_ranks(label_gains, label_gains, mask)
    return (label_gains * weights * mean_discounts(ranks, weights, k)).sum(-1)


@operation
def mean_discounts(ranks: Tensor, weights: Tensor, k: Tensor | None) -> Tensor:
    """Return the mean discount of the copies of each item, (B, N); items of equal rank share their places.

    Args:
        ranks: Ranks of `tie_ranks`, (B, N).
        weights: (B, N).
        k: Number of places that count, (B,); None = all.
    """
    above, held = weights_above(ranks, weights)
    most = torch.full_like(above, math.inf) if k is None else k[:, None].double()
    sums = discount_sums(torch.minimum(above + held, most)) - discount_sums(torch.minimum(above, most))
    return (sums / torch.where(held > 0, held, 1.0)).to(ranks.dtype)


def _serves(ranks: Tensor, weights: Tensor, k: Tensor | None) -> bool:
    given = is_float32(ranks, weights) and ranks.numel() > 0
    return given and float(weights.sum(-1).max()) < 0.99 * EXACT


@mean_discounts.backend("numba", _serves)
def _numba(ranks: Tensor, weights: Tensor, k: Tensor | None) -> Tensor:
    return weigh_lists(ranks, weights, k, _sums())


@cache
def _sums() -> Tensor:
    """Return D(1) + ... + D(t) for t = 0, 1, ..., EXACT, float64."""
    return torch.nn.functional.pad(discount(torch.arange(1, EXACT + 1), torch.float64).cumsum(0), (1, 0))


def normalised_gains(
    labels: Tensor, gain: Gain, mask: Tensor, k: int | Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return g(y_i) / ideal DCG@k of each list, (B, N); 0 where masked, and in lists whose ideal DCG is 0.

    Exponential gains are computed relative to the largest label of the list, so that they cannot overflow. This does
    not change the quotient. With weights, the ideal list has w copies of an item of weight w.

    Example:
        >>> normalised_gains(torch.tensor([[200.0, 0.0]]), "exponential", torch.ones(1, 2, dtype=torch.bool))
        tensor([[1., 0.]])
    """
    if gain == "exponential":
        top = labels.amax(-1, keepdim=True)
        labels = torch.exp2(labels - top) - torch.exp2(-top)
    values = torch.where(mask, labels, 0.0)
    if weights is None:
        ideal = ideal_dcg(values, k)[:, None]
    else:
        assert not isinstance(k, int)
        ideal = weighted_ideal_dcg(values, mask, k, weights)[:, None]
    return torch.where(ideal > 0, values / torch.where(ideal > 0, ideal, 1.0), 0.0)
