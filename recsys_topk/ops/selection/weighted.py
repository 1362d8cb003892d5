"""Lists whose items have weights. An item of weight 2 counts as two copies, an item of weight 0 as a masked one."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.numerics import LOG2, SLACK, is_full
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import is_float32, is_real, operation
from recsys_topk.ops.selection.kth_pair import kth_pair

_PAIR_LISTS = Loop("recsys_topk.ops.backends.compiled.selection:pair_lists")

# Steps of `balance` that at least halve the error, and steps that square it.
HALVING, SQUARING = 7, 6


@operation
def weighted_pair(filled: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_[k] and x_[k+1] of each list, (B, 1) each, without gradient.

    In descending order of the scores, x_[k] is the first score at which the cumulated weight reaches k, and x_[k+1] the
    first at which it exceeds k. With weights of 1 these are the k-th and the (k+1)-th score.

    Args:
        filled: (B, N), -inf where the weight is 0.
        k: (B,), 0 < k < sum of the weights.
        weights: (B, N), at least 0.

    Example:
        >>> weighted_pair(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([2]), torch.tensor([[2.0, 1.0, 1.0]]))
        (tensor([[3.]]), tensor([[2.]]))
    """
    ordered, order = filled.detach().sort(-1, descending=True)
    reached = weights.gather(-1, order).double().cumsum(-1)
    wanted = k[:, None].double()
    rounding = SLACK * wanted
    last = (weights > 0).sum(-1, keepdim=True).clamp_min(1) - 1
    kept = (reached < wanted - rounding).sum(-1, keepdim=True).minimum(last)
    cut = (reached <= wanted + rounding).sum(-1, keepdim=True).minimum(last)
    return ordered.gather(-1, kept), ordered.gather(-1, cut)


def _serves(filled: Tensor, k: Tensor, weights: Tensor) -> bool:
    return is_float32(filled, weights) and is_real(k) and filled.numel() > 0


@weighted_pair.backend("numba", _serves)
def _numba(filled: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    (lists, n), parts = filled.shape, number_of_parts(len(filled))
    size, pair = -(-n // WIDTH) * WIDTH, torch.empty(2, lists, 1)
    finite = torch.empty(parts, dtype=torch.uint8)
    given = (filled.detach().contiguous(), k.double().contiguous(), weights.detach().contiguous())
    run_parts(_PAIR_LISTS, lists, n, *given, torch.empty(parts, 3, size), size, pair[0], pair[1], finite)
    return (pair[0], pair[1]) if bool(finite.all()) else weighted_pair.reference(filled, k, weights)


def kth_score(scores: Tensor, k: int | Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Return x_[k] of each list, (B, 1), without gradient; weights: (B, N), 0 where masked, None = 1."""
    if weights is None or not isinstance(k, Tensor):
        return kth_pair(scores.detach(), k, mask)[0]
    filled = scores.detach() if is_full(mask) else torch.where(mask, scores.detach(), -math.inf)
    return weighted_pair(filled, k, weights)[0]


def balance(z: Tensor, gap: Tensor, k: Tensor, weights: Tensor, law: Literal["logistic", "laplace"]) -> Tensor:
    """Return b with sum_i w_i F(z_i - b) = k, (B, 1), without gradient; F is the distribution function of the law.

    With T the weight k of the largest items and R the rest (tied items are in both, in part), the sum is k where
    h(b) = log sum_R w p - log sum_T w (1 - p) is 0. -h' is in [1, 2]. At the midpoint of the k-th pair abs(h) is at
    most the log of the total weight over the weight of an item at the pair: a step of 3/4 h at least halves the error,
    and a Newton step turns an error e into at most 9/8 e^2. The number of steps is fixed, so that nothing is read.

    Args:
        z: (B, N), x / tau with x_[k+1] = 0; -inf where the weight is 0.
        gap: (B, 1), z_[k] - z_[k+1].
        k: (B,), 0 < k < sum of the weights.
        weights: (B, N).
        law: The law.
    """
    tied, larger = torch.where(z == gap, weights, 0.0), torch.where(z > gap, weights, 0.0)
    part = ((k[:, None] - larger.sum(1, keepdim=True)) / tied.sum(1, keepdim=True)).clamp(0.0, 1.0)
    top = larger + tied * torch.where(gap > 0.0, 1.0, part)
    rest = weights - top
    b = 0.5 * gap
    for step in range(HALVING + SQUARING):
        log_p, log_q, rise, fall = _tails(z - b, law)
        at_cut, at_kept = _tails(-b, law)[0], _tails(gap - b, law)[1]
        # The exponents are at most 0 where the weight is not 0. Infinity times 0 would be NaN.
        p = rest * torch.exp((log_p - at_cut).clamp_max(0.0))
        q = top * torch.exp((log_q - at_kept).clamp_max(0.0))
        sum_p, sum_q = p.sum(1, keepdim=True), q.sum(1, keepdim=True)
        h = torch.log(sum_p / sum_q) + (at_cut - at_kept)
        slope = (p * rise).sum(1, keepdim=True) / sum_p + (q * fall).sum(1, keepdim=True) / sum_q
        b = b + (0.75 * h if step < HALVING else h / slope)
    return b


def _tails(u: Tensor, law: Literal["logistic", "laplace"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log F(u), log F(-u) and the derivatives d log F(u) / du and -d log F(-u) / du."""
    if law == "logistic":
        return F.logsigmoid(u), F.logsigmoid(-u), torch.sigmoid(-u), torch.sigmoid(u)
    far, up = -u.abs(), u > 0
    e = torch.exp(far)
    smaller, larger, slope = far - LOG2, torch.log1p(-0.5 * e), e / (2.0 - e)
    one = torch.ones_like(e)
    return (
        torch.where(up, larger, smaller),
        torch.where(up, smaller, larger),
        torch.where(up, slope, one),
        torch.where(up, one, slope),
    )
