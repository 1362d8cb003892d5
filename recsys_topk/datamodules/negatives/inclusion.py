"""Inclusion probabilities of sampled negatives, for the logQ correction of a sampled softmax.

The partition function of a softmax over all items is the sum Z = sum_j exp(x_j). A list always contains its own items,
and other items are sampled. Let pi_j be the probability that item j is sampled. The sum of exp(x_j) / pi_j over the
sampled items has the same expectation as the sum of exp(x_j) over all items that could be drawn (Horvitz and Thompson
1952). The correction therefore subtracts log pi_j from the score of a sampled item. It is the "logQ correction" of
Bengio and Senecal (2008), made exact for draws without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recsys_topk.datamodules.negatives.sampling import Drawn

_TERMS: Final = 12


def log_inclusion(share: Tensor, tries: Tensor, waited: Tensor) -> Tensor:
    """Return log pi_j, the log-probability that item j is among n distinct items drawn in proportion to a weight.

    Draws are repeated until n + 1 distinct items are found. The last of them is not used.

    Let the draws be a Poisson process with one draw per unit of time on average. Item j then first arrives after an
    exponential time of rate p_j, its share of the weight, independently of the other items. It is among the first n
    items if and only if it arrives before the n-th of the other items. For the items of the list, this is the arrival
    time G of draw number M, the draw that found item n + 1. G has the distribution Gamma(M), independent of the items.
    Given G, pi_j = 1 - exp(-p_j G), and weights 1 / pi_j are unbiased. Their mean over G is unbiased too, and depends
    only on M:

        1 / pi_j = E[1 / (1 - exp(-p_j G))] = sum_{i >= 0} (1 + i p_j)^-M.

    For rare items this is 1 / ((M - 1) p_j), the usual correction by the expected count. If an exponential race over
    all items filled the list after the draws (`draw_distinct`), the time t of the race is added to G, and term i has
    the factor exp(-i p_j t). The first terms of the series are summed directly, and the Euler-Maclaurin formula gives
    the rest, to double precision.

    Args:
        share: (B, n) in (0, 1], p_j.
        tries: (B,) int64, M >= 2.
        waited: (B,) float64, t; infinite if fewer than n + 1 items could be drawn, so that every item has pi_j = 1.

    Returns:
        (B, n) float64.

    Example:
        >>> log_inclusion(torch.tensor([[0.5, 1e-6]]), torch.tensor([11]), torch.zeros(1)).exp()
        tensor([[9.8805e-01, 9.9999e-06]], dtype=torch.float64)
    """
    p = share.double().clamp_min(torch.finfo(torch.float64).tiny)
    m = tries.double().clamp_min(2.0)[:, None]
    certain = waited.isinf()[:, None]
    t = torch.where(certain, 0.0, waited.double()[:, None])
    total = torch.ones_like(p)
    for i in range(1, _TERMS):
        total = total + torch.exp(-m * torch.log1p(i * p) - i * p * t)
    u = 1.0 + _TERMS * p
    last = torch.exp(-m * torch.log(u) - _TERMS * p * t)
    z = t * u
    s = z + m
    # exp(z) E_m(z), the generalised exponential integral. A race follows many draws, so m is large where t > 0.
    series = 1.0 + m / s**2 + m * (m - 2 * z) / s**4 + m * (6 * z**2 - 8 * m * z + m**2) / s**6
    integral = torch.where(t > 0, series / s, 1.0 / (m - 1.0)) * u / p
    slope = p * t + m * p / u
    third = slope**3 + 3 * slope * m * (p / u) ** 2 + 2 * m * (p / u) ** 3
    total = total + last * (integral + 0.5 + slope / 12 - third / 720)
    return torch.where(certain, 0.0, -torch.log(total))


@dataclass(frozen=True)
class Part:
    """Draws from one source: `number` per list, other than the list's own items and the draws of earlier parts.

    Attributes:
        number: Wanted number of negatives per list, n.
        drawn: The drawn items. A weighted source draws n + 1 items; the last one only determines when to stop.
        share: (C,) float64, the share of each item in the total weight; None = all items are equally likely.
        left: (B,) int64, number of catalogue items that could be drawn for each list.
    """

    number: int
    drawn: Drawn
    share: Tensor | None
    left: Tensor

    @property
    def items(self) -> Tensor:
        """(B, n) drawn items as rows of the catalogue."""
        return self.drawn.items[:, : self.number]

    @property
    def mask(self) -> Tensor:
        """(B, n) boolean, True = an item was drawn."""
        return self.drawn.mask[:, : self.number]

    def log_probability(self) -> Tensor:
        """Return log pi of each draw, (B, n) float64."""
        if self.share is None:
            found = self.mask.sum(1) / self.left.clamp_min(1)
            return found.double().clamp_min(torch.finfo(torch.float64).tiny).log()[:, None].expand(self.items.shape)
        return log_inclusion(self.share[self.items], self.drawn.tries, self.drawn.waited)

    def expected(self, items: Tensor, catalogue: int) -> Tensor:
        """Return n times the probability that one draw of this source is the item, for each item, float64."""
        if self.share is None:
            return torch.full(items.shape, self.number / catalogue, dtype=torch.float64, device=items.device)
        return self.number * self.share[items]


def log_correction(parts: Sequence[Part], catalogue: int) -> Tensor:
    """Return the values to subtract from the scores of sampled items, (B, sum of n) float32; 0 where nothing was drawn.

    Given the earlier draws, part t estimates the sum over all items. Items of earlier parts are known and have weight
    1; the draws of part t have weight 1 / pi_t. The estimates of the parts are combined per item. Part t contributes
    the share lambda_t(j) = n_t q_t(j) / sum_s n_s q_s(j) of item j, where q_t(j) is the probability that one draw of
    part t is j. The shares of an item sum to 1, so the result is unbiased over all items that some part can draw.

    Item j, drawn by part t, has the weight lambda_t(j) / pi_t(j) + sum_{s > t} lambda_s(j). The correction is minus the
    logarithm of this weight. With one part it is log pi. For rare items it is log sum_s n_s q_s(j), the logarithm of
    the expected count.

    Args:
        parts: The parts, in the order in which they were drawn.
        catalogue: Number of items, C.
    """
    found = []
    for number, part in enumerate(parts):
        expected = torch.stack([one.expected(part.items, catalogue) for one in parts])
        portion = expected / expected.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
        weight = portion[number] * torch.exp(-part.log_probability()) + portion[number + 1 :].sum(0)
        found.append(torch.where(part.mask, -weight.log(), 0.0))
    return torch.cat(found, 1).float()
