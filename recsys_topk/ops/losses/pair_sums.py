"""The logistic loss over weighted pairs of a list, and its closed-form gradient."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import is_float32, operation, runs_triton
from recsys_topk.ops.losses.dcg import discount
from recsys_topk.ops.losses.known_gradient import known_gradient

Kind = Literal["ones", "differences", "rows"]

KINDS: tuple[Kind, ...] = ("ones", "differences", "rows")  # a compiled loop takes the position

ROWS = 11  # of the buffer of a compiled loop

_PAIR_LISTS, _COUNT_LISTS = (
    Loop(f"recsys_topk.ops.backends.compiled.pairs:{name}") for name in ("pair_lists", "count_lists")
)


class PairWeights(NamedTuple):
    """w_ij = v_i v_j g_ij (abs(D_i - D_j) + mu delta_ij), or v_i v_j g_ij without discounts and ranks.

    delta_ij = D(d) - D(d + 1) with d = abs(r_i - r_j) and D(r) = 1 / log2(1 + r); with a k, pairs with a rank beyond k
    are divided by 1 - D(max(r_i, r_j)) (Jagerman et al. 2022).

    Attributes:
        first: Values of the items i, (B, N); -inf where an item cannot be the first of a pair (``"rows"``: 0).
        second: Values of the items j, (B, N); inf where masked. Not for ``"rows"``: equal to `first` where that is
            finite, so that only one item of a pair can be the first.
        kind: g_ij is 1 if first_i > second_j (``"ones"``), max(first_i - second_j, 0) (``"differences"``), or first_i
            for all valid j (``"rows"``).
        discounts: D_i, (B, N); None = the first part is 0.
        ranks: r_i, (B, N), the ranks of `tie_ranks`; None = the second part is 0.
        mu: Weight of the second part.
        k: One int, one number per list, (B,), or None: no cut.
        items: v_i, the weights of the items, (B, N); None = 1. The ranks are then those of `weighted_ranks`.
    """

    first: Tensor
    second: Tensor
    kind: Kind
    discounts: Tensor | None = None
    ranks: Tensor | None = None
    mu: float = 1.0
    k: int | Tensor | None = None
    items: Tensor | None = None

    def block(self, lists: slice, rows: Tensor) -> Tensor:
        """Return the weights of some lists, (b, P, N), for the items i at `rows`, (B, P)."""
        rows = rows[lists]
        first, second = self.first[lists].gather(1, rows)[:, :, None], self.second[lists, None]
        if self.kind == "ones":
            gain = (first > second).to(self.first.dtype)
        elif self.kind == "rows":
            gain = torch.where(second < math.inf, first, 0.0)
        else:
            gain = (first - second).clamp_min(0.0)
        weight: Tensor | None = None
        if self.discounts is not None:
            d = self.discounts[lists]
            weight = (d.gather(1, rows)[:, :, None] - d[:, None]).abs()
        if self.ranks is not None:
            r = self.ranks[lists]
            k = self.k[lists, None, None] if isinstance(self.k, Tensor) else self.k
            delta = distance_weight(r.gather(1, rows)[:, :, None], r[:, None], k)
            weight = self.mu * delta if weight is None else weight.add_(delta, alpha=self.mu)
        gain = gain if weight is None else gain.mul_(weight)
        if self.items is None:
            return gain
        return gain * self.items[lists].gather(1, rows)[:, :, None] * self.items[lists, None]

    def tensors(self) -> list[Tensor | None]:
        """Return the values of the items, None where there are none."""
        return [self.first, self.second, self.discounts, self.ranks, self.items]


def distance_weight(a: Tensor, b: Tensor, k: int | Tensor | None) -> Tensor:
    """Return delta of two ranks, see `PairWeights`; the shapes broadcast."""
    # Different items are at least half a rank apart, or count as such if they have small weights. Equal items have
    # equal gains, so any finite weight is correct.
    distance = (a - b).abs().clamp_min(0.5)
    delta = discount(distance, distance.dtype) - discount(distance + 1.0, distance.dtype)
    if k is None:
        return delta
    worse = torch.maximum(a, b)
    return torch.where(worse > k, delta / (1.0 - discount(worse.clamp_min(1.5), delta.dtype)), delta)


@operation
def pair_sums(scores: Tensor, weights: PairWeights, sigma: float) -> Tensor:
    """Return sum over pairs of w_ij log(1 + exp(-sigma (x_i - x_j))) for each list, (B,).

    The weights are constants. The reference stores B N^2 numbers; `recsys_topk.losses.pairs` computes blocks of them.

    Args:
        scores: (B, N), finite.
        weights: The weights.
        sigma: Steepness.
    """
    rows = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    z = sigma * (scores[:, :, None] - scores[:, None, :])
    return -(F.logsigmoid(z) * weights.block(slice(None), rows)).sum((1, 2))


def _serves(scores: Tensor, weights: PairWeights, sigma: float) -> bool:
    given = [x for x in weights.tensors() if x is not None]
    return is_float32(scores, *given) and scores.numel() > 0


@lru_cache(8)
def delta_tables(n: int, mu: float) -> tuple[Tensor, Tensor]:
    """Return tables of mu delta for lists of n items, and the factor of delta beyond k, by twice the rank.

    The first has two parts: mu delta by the difference of two ranks, from -n - WIDTH + 1 on, and mu delta by twice the
    distance of two ranks.
    """
    halves = torch.arange(2 * n + 3, dtype=torch.float64) / 2
    steps = torch.arange(-n - WIDTH + 1, n + WIDTH + 1, dtype=torch.float64)
    near = mu * distance_weight(torch.cat([steps, halves]), torch.zeros(()), None)
    deep = 1.0 / (1.0 - discount(halves.clamp_min(1.5), halves.dtype))
    return near.float(), deep.float()


@pair_sums.backend("numba", _serves)
def _numba(scores: Tensor, weights: PairWeights, sigma: float) -> Tensor:
    lists, n = scores.shape
    kept = [None if x is None else x.detach().contiguous() for x in (scores, *weights.tensors())]
    k = math.inf if weights.k is None else weights.k
    ks = k.float() if isinstance(k, Tensor) else torch.full((lists,), float(k))
    tables = delta_tables(n, weights.mu)
    wants = scores.requires_grad and torch.is_grad_enabled()
    value, gradient = torch.empty(lists), torch.empty(lists, n) if wants else None
    parts, size = number_of_parts(lists), 2 * -(-n // WIDTH) * WIDTH
    buffers, finite = torch.empty(parts, ROWS, size), torch.empty(parts, dtype=torch.uint8)
    form = (weights.discounts is not None) + 2 * (weights.ranks is not None)
    kind, outputs = KINDS.index(weights.kind), (value, gradient, finite)
    run_parts(_PAIR_LISTS, lists, n, kind, form, *kept, ks, *tables, weights.mu, sigma, buffers, size, *outputs)
    if not bool(finite.all()):
        return pair_sums.reference(scores, weights, sigma)
    return known_gradient(scores, value, gradient, lambda x: pair_sums.reference(x, weights, sigma))


def _serves_triton(scores: Tensor, weights: PairWeights, sigma: float) -> bool:
    given = [x for x in weights.tensors() if x is not None]
    return runs_triton(scores, *given) and scores.shape[1] > 0


@pair_sums.backend("triton", _serves_triton, traced=True)
def _triton(scores: Tensor, weights: PairWeights, sigma: float) -> Tensor:
    from recsys_topk.ops.backends.triton_kernels.pair_sums import pair_sums_triton

    return pair_sums_triton(scores, weights, sigma)


@operation
def count_pairs(first: Tensor, second: Tensor, items: Tensor | None = None) -> Tensor:
    """Return the number of pairs with first_i > second_j in each list, (B,); first_i = -inf is in no pair.

    With the weights of the items, (B, N), it is the sum of the products of the weights of the pairs.
    """
    ordered, order = second.sort(-1)
    below = torch.searchsorted(ordered, first.contiguous())
    if items is None:
        return below.sum(-1)
    lighter = F.pad(items.gather(-1, order).double().cumsum(-1), (1, 0)).gather(-1, below)
    return (items * lighter).sum(-1).to(items.dtype)


@count_pairs.backend("numba", lambda *given: is_float32(*(x for x in given if x is not None)))
def _count_numba(first: Tensor, second: Tensor, items: Tensor | None = None) -> Tensor:
    given = [None if x is None else x.detach().contiguous() for x in (first, second, items)]
    counts = torch.empty(len(first), dtype=torch.float64)
    run_parts(_COUNT_LISTS, len(first), first.shape[1], *given, counts)
    return counts.long() if items is None else counts.float()
