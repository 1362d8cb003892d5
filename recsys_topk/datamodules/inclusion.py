"""How likely a sampled negative was to be in its list, so that a sampled softmax estimates the full one.

The partition function of a softmax over all items is a sum, Z = sum_j exp(x_j). A list holds its own items for certain
and others by chance. If item j was to be in it with probability pi_j, sum over the sampled of exp(x_j) / pi_j has the
expectation of the sum over all items that could be drawn (Horvitz and Thompson 1952). So the correction subtracts
log pi_j from the score of a sampled item; it is the "logQ correction" of Bengio and Senecal (2008), made exact for
draws without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recsys_topk.datamodules.sampling import Drawn

_TERMS: Final = 12


def log_inclusion(share: Tensor, tries: Tensor, waited: Tensor) -> Tensor:
    """Return log pi of items drawn in proportion to a weight, each once, until n + 1 were found; the last is not used.

    Let draws arrive one per unit of time on average, as a Poisson process. Then item j arrives first after an
    exponential time of rate p_j, its share of the weight, independently of the others; and it is among the first n
    exactly if it comes before the n-th of the others. For the items of the list, that is when draw number M arrived,
    the one that brought item n + 1, after a time G of distribution Gamma(M), whatever the items. Given G,
    pi_j = 1 - exp(-p_j G), and dividing by it is unbiased; its mean over G is too, and depends on M alone:

        1 / pi_j = E[1 / (1 - exp(-p_j G))] = sum_{i >= 0} (1 + i p_j)^-M.

    For rare items this is 1 / ((M - 1) p_j), the usual correction by the expected count. If a race over all items
    ended the draws, its time t is added to G, and the terms have the factor exp(-i p_j t). The series is summed to
    double precision by its first terms and the formula of Euler and Maclaurin for the rest.

    Args:
        share: (B, n) in (0, 1], p_j.
        tries: (B,) int64, M >= 2.
        waited: (B,) float64, t; infinite where fewer than n + 1 items could be drawn, so that all were certain.

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
    # exp(z) E_m(z), the generalised exponential integral; races come after many draws, so m is large where t > 0.
    series = 1.0 + m / s**2 + m * (m - 2 * z) / s**4 + m * (6 * z**2 - 8 * m * z + m**2) / s**6
    integral = torch.where(t > 0, series / s, 1.0 / (m - 1.0)) * u / p
    slope = p * t + m * p / u
    third = slope**3 + 3 * slope * m * (p / u) ** 2 + 2 * m * (p / u) ** 3
    total = total + last * (integral + 0.5 + slope / 12 - third / 720)
    return torch.where(certain, 0.0, -torch.log(total))


@dataclass(frozen=True)
class Part:
    """Draws of one source: `number` per list, given the list's own items and the draws of the parts before.

    Attributes:
        number: Negatives asked for per list, n.
        drawn: What was drawn; for a source by weight n + 1 items, of which the last one only ends the draws.
        share: (C,) float64, the share of each item in the source's weight; None = all items are equally likely.
        left: (B,) int64, how many items could be drawn: those of the catalogue that were not taken before.
    """

    number: int
    drawn: Drawn
    share: Tensor | None
    left: Tensor

    @property
    def items(self) -> Tensor:
        """(B, n) rows of the catalogue."""
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
        """Return n times the chance that one draw of this source is each item, float64."""
        if self.share is None:
            return torch.full(items.shape, self.number / catalogue, dtype=torch.float64, device=items.device)
        return self.number * self.share[items]


def log_correction(parts: Sequence[Part], catalogue: int) -> Tensor:
    """Return what to subtract from the scores of sampled items, (B, sum of n), float32; 0 where nothing was drawn.

    Given the draws before it, part t estimates the sum over all items by what is known for certain (the items of the
    parts before) and its own draws divided by pi_t. Part t answers for the share
    lambda_t(j) = n_t q_t(j) / sum_s n_s q_s(j) of item j, where q_t(j) is the chance that one draw of part t is j; the
    shares of an item add up to 1, so the whole is unbiased over all items that some part can draw. Item j of part t
    has the weight lambda_t(j) / pi_t(j) + sum_{s > t} lambda_s(j), and the correction is minus its logarithm. With one
    part that is log pi. For rare items it is log sum_s n_s q_s(j), the expected count.

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
