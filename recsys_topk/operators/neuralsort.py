"""NeuralSort: the mass of an item in the first k rows of a relaxed permutation matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_not_negative
from recsys_topk.numerics import LOWEST_EXPONENT, add_eps, is_full, log1mexp, masked_logsumexp
from recsys_topk.operators.base import OperatorOptions, SoftSelection, TopKOperator
from recsys_topk.operators.score_scale import Tau
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import (
    closed_form,
    is_float32,
    is_real,
    may_read,
    operation,
    through_reference,
    wants_graph,
)
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.sorting import average_ties, sort_descending

MASS_ROWS, GRADIENT_ROWS = 8, 13  # of the buffers of the compiled loops
_MASSES, _GRADIENTS = (
    Loop(f"recsys_topk.ops.backends.compiled.neural:{name}") for name in ("neuralsort_lists", "neuralsort_gradients")
)

# Rows of the relaxed permutation are computed in chunks of about this many entries, which fit in the cache.
CHUNK = 2**18


class NeuralSort(TopKOperator):
    """Top-k mass of NeuralSort's relaxed permutation, without its n x n matrix.

    Row r is softmax_i(((n + 1 - 2 r) x_i - sum_j |x_i - x_j|) / tau); U_i is the mass of item i in rows 1..k, D_i in
    the rows after k. Rows sum to 1, columns do not. There are two forms:

    - normalised (the default, used by the loss): p = U / C and 1 - p = D / C with C = U + D held constant, so that
      log p and log(1 - p) have the gradients of log U and log D (the form of LCRON). Needs all rows: n^2 time.
    - plain: p = U, which sums to k and may exceed 1; log(1 - p) is then -inf with zero gradient. Needs the first k
      rows: k n time.

    Both use O(n) memory: rows are computed in chunks and recomputed in the backward pass. Masses are summed as
    logarithms to avoid underflow at small tau.

    Args:
        tau: Temperature.
        normalised: True = the normalised form, False = the plain form.
        eps: Added to C in the normalised form (LCRON's published loss has 1e-6).
        options: See `TopKOperator`.

    Example:
        >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> NeuralSort(normalised=False)(x, k=2).p.round(decimals=3)
        tensor([[0.9310, 0.2230, 0.8350, 0.0110]])
        >>> NeuralSort()(x, k=2).p.round(decimals=3)
        tensor([[0.9890, 0.2110, 0.7890, 0.0110]])
    """

    name, cost = "neuralsort", "n^2"
    sums_to_k = False
    exact_gradient = False
    loss_leaves_out = ("normalised",)
    paper = "Grover et al. 2019, arXiv 1903.08850"

    def __init__(
        self, tau: Tau = 1.0, normalised: bool = True, eps: float = 0.0, **options: Unpack[OperatorOptions]
    ) -> None:
        super().__init__(tau, **options)
        self.normalised = normalised
        self.eps = check_not_negative("eps", eps)

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        full = is_full(mask)
        filled = scores if full else fill_masked(scores, mask, -math.inf)
        shape, device = scores.shape[:1], scores.device
        ks = k if isinstance(k, Tensor) else torch.full(shape, k, device=device)
        count = torch.full(shape, scores.shape[1], device=device) if full else count_true(mask)
        log_u, log_d = closed_form(_Masses, _reference, filled, ks, count, self.tau, self.normalised)
        if not self.normalised:
            return SoftSelection(log_u, log1mexp(log_u.clamp_max(0.0)), mask)
        log_c = add_eps(torch.logaddexp(log_u, log_d).detach(), self.eps)
        if not full:
            log_c = torch.where(mask, log_c, 0.0)
        return SoftSelection(log_u - log_c, log_d - log_c, mask)

    def extra_repr(self) -> str:
        """Show the temperature and the form."""
        return super().extra_repr() + ("" if self.normalised else ", normalised=False")


class _Masses(torch.autograd.Function):
    """log U and log D, computed on sorted scores, where sums of distances are cumulative sums."""

    @staticmethod
    def forward(
        ctx: Any, filled: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
    ) -> tuple[Tensor, Tensor]:
        values, order = sort_descending(filled)
        v, distance = _centred(values, count)
        log_u, log_d = neuralsort_masses(v, distance, k, count, tau, normalised)
        ctx.save_for_backward(filled, values, order, k, count, log_u, log_d)
        ctx.tau, ctx.normalised = tau, normalised
        back = _inverse(order)
        return log_u.gather(1, back), log_d.gather(1, back)

    @staticmethod
    def backward(ctx: Any, grad_u: Tensor, grad_d: Tensor) -> tuple[Tensor | None, ...]:
        filled, values, order, k, count, log_u, log_d = ctx.saved_tensors
        if wants_graph():
            return through_reference(_reference, (filled, k, count, ctx.tau, ctx.normalised), (grad_u, grad_d))
        v, distance = _centred(values, count)
        grad_v, grad_distance = neuralsort_gradient(
            v,
            distance,
            k,
            count,
            log_u,
            log_d,
            grad_u.gather(1, order),
            grad_d.gather(1, order),
            ctx.tau,
            ctx.normalised,
        )
        # distance_i = sum_j |v_i - v_j|; in descending order, item i is larger than n - i items and smaller than i - 1.
        ranks = torch.arange(1, v.shape[1] + 1, device=v.device)
        through = grad_distance.cumsum(1)
        both_sides = 2.0 * through - grad_distance - through[:, -1:]
        grad = grad_v + grad_distance * (count[:, None] + 1 - 2 * ranks) - both_sides
        grad = torch.where(ranks <= count[:, None], grad, 0.0)
        return average_ties(values, grad).gather(1, _inverse(order)), None, None, None, None


def _reference(filled: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return log U and log D from the full matrix, (B, n, n). Differentiable to any order; n^2 memory."""
    valid = filled > -math.inf
    n, ranks = count[:, None], torch.arange(1, filled.shape[1] + 1, device=filled.device)
    x = torch.where(valid, filled, 0.0)
    x = torch.where(valid, x - x.detach().sum(1, keepdim=True) / n, 0.0)
    pairs = valid[:, :, None] & valid[:, None, :]
    distance = torch.where(pairs, (x[:, :, None] - x[:, None, :]).abs(), 0.0).sum(2)
    slope = (n + 1 - 2 * ranks).to(x.dtype)
    logits = (slope[:, :, None] * x[:, None, :] - distance[:, None, :]) / tau
    log_rows = torch.log_softmax(torch.where(valid[:, None, :], logits, -math.inf), dim=2)
    first = (ranks <= k[:, None])[:, :, None] & valid[:, None, :]
    rest = ((ranks > k[:, None]) & (ranks <= n))[:, :, None] & valid[:, None, :]
    log_u = masked_logsumexp(log_rows, first, dim=1)
    return log_u, masked_logsumexp(log_rows, rest, dim=1) if normalised else torch.full_like(log_u, -math.inf)


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _centred(values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values minus their mean (0 where masked) and the sum of distances of each (inf where masked).

    Rows are invariant to a shift of the scores, and float32 sums of centred values are much more accurate.
    """
    n, ranks = count[:, None], torch.arange(1, values.shape[1] + 1, device=values.device)
    valid = ranks <= n
    v = torch.where(valid, values, 0.0)
    v = torch.where(valid, v - v.sum(1, keepdim=True) / n, 0.0)
    sums = v.cumsum(1)
    distance = v * (n - 2 * ranks) + 2.0 * sums - sums[:, -1:]
    return v, torch.where(valid, distance, math.inf)


class _Chunk(NamedTuple):
    """A chunk of rows: the row numbers and the weight of each row in U and in D, (B, R, 1); None = 1, False = 0."""

    numbers: Tensor
    in_u: Tensor | Literal[False] | None
    in_d: Tensor | Literal[False] | None


def _chunks(v: Tensor, k: Tensor, count: Tensor, normalised: bool) -> Iterator[_Chunk]:
    """Yield all needed rows in chunks. A chunk lies on one side of the k of every list if possible."""
    if may_read(k):
        low, high = int(k.min()), int(k.max())
        least, most = (int(count.min()), int(count.max())) if normalised else (high, high)
    else:
        low, high = 0, v.shape[1]
        least = most = high
    size = max(1, CHUNK // max(1, v.numel()))
    for start, stop in ((0, low), (low, high), (high, least), (max(high, least), most)):
        for first in range(start, stop, size):
            numbers = torch.arange(first + 1, min(first + size, stop) + 1, device=v.device)
            column = numbers[:, None]
            in_u: Tensor | Literal[False] | None = None
            in_d: Tensor | Literal[False] | None = False
            if stop > low:
                in_u = (column <= k[:, None, None]).to(v.dtype) if start < high else False
                in_d = False if not normalised else None
                if normalised and (start < high or stop > least):
                    in_d = ((column > k[:, None, None]) & (column <= count[:, None, None])).to(v.dtype)
            yield _Chunk(numbers, in_u, in_d)


def _log_rows(v: Tensor, distance: Tensor, count: Tensor, numbers: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the logarithms of rows `numbers` of the relaxed permutation, (B, R, N), and their slopes, (B, R, 1)."""
    slope = ((count[:, None] + 1 - 2 * numbers).to(v.dtype) / tau)[:, :, None]
    logits = torch.mul(slope, v[:, None, :]).sub_(distance[:, None, :] / tau)
    return torch.log_softmax(logits, dim=2), slope


def _fake_masses(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(v)


@operation(fake=_fake_masses)
def neuralsort_masses(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Return log U and log D (-inf in the plain form, and where masked), (B, N) in descending order of the scores.

    Args:
        v: (B, N), centred scores, descending, 0 where masked.
        distance: (B, N), the sum of the distances of each item to all others, inf where masked.
        k: (B,) int64, 1 <= k < count.
        count: (B,) int64, the number of valid items, which come first.
        tau: Temperature.
        normalised: Whether the rows after the k-th are needed.
    """
    near_u, near_d = _references(v, distance, k, count, tau)
    u, d = torch.zeros_like(v), torch.zeros_like(v)
    for chunk in _chunks(v, k, count, normalised):
        log_rows, _ = _log_rows(v, distance, count, chunk.numbers, tau)
        for total, near, weight in ((u, near_u, chunk.in_u), (d, near_d, chunk.in_d)):
            if weight is not False:
                mass = _exp(log_rows - near[:, None, :])
                total += (mass if weight is None else mass.mul_(weight)).sum(1)
    valid = torch.isfinite(distance)
    return torch.where(valid, near_u + u.log(), -math.inf), torch.where(valid, near_d + d.log(), -math.inf)


def _references(v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return, per item, about the largest logarithm in rows 1..k and in the rows after k, (B, N) each.

    The mass of an item is largest in the row of its own rank, and on the other side of k in the nearest row. Masses are
    summed relative to these values, so they neither overflow nor underflow.
    """
    ranks, valid = torch.arange(1, v.shape[1] + 1, device=v.device), torch.isfinite(distance)
    near = []
    for row, own_side in ((k[:, None], ranks <= k[:, None]), (k[:, None] + 1, ranks > k[:, None])):
        slope = (count[:, None] + 1 - 2 * row).to(v.dtype)
        logits = (slope * v - distance) / tau
        other = (logits - logits.gather(1, row - 1)).clamp_max(0.0)
        near.append(torch.where(own_side | ~valid, 0.0, other))
    return near[0], near[1]


def _exp(x: Tensor) -> Tensor:
    """Return exp(x) for logarithms x of shares, in place.

    A share is at most 1. x > 0 is a rounding error, or a row with weight 0 for this list (infinity times 0 would be
    NaN). The lower bound avoids underflow, which makes exp slow on a CPU.
    """
    return x.clamp_(LOWEST_EXPONENT[x.dtype], 0.0).exp_()


def _fake_gradient(v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(v)


@operation(fake=_fake_gradient)
def neuralsort_gradient(
    v: Tensor,
    distance: Tensor,
    k: Tensor,
    count: Tensor,
    log_u: Tensor,
    log_d: Tensor,
    grad_u: Tensor,
    grad_d: Tensor,
    tau: float,
    normalised: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `neuralsort_masses` with respect to `v` and `distance`, (B, N) each.

    With L the logarithm of the rows, dL_ri/dlogit_rj = [i = j] - P_rj, and dlog U_i/dL_ri = P_ri / U_i.
    """
    grad_v, grad_distance = torch.zeros_like(v), torch.zeros_like(v)
    safe_u, safe_d = torch.where(torch.isneginf(log_u), 0.0, log_u), torch.where(torch.isneginf(log_d), 0.0, log_d)
    for chunk in _chunks(v, k, count, normalised):
        log_rows, slope = _log_rows(v, distance, count, chunk.numbers, tau)
        into: Tensor | None = None
        for log_mass, grad, weight in ((safe_u, grad_u, chunk.in_u), (safe_d, grad_d, chunk.in_d)):
            if weight is not False:
                share = _exp(log_rows - log_mass[:, None, :]).mul_(grad[:, None, :])
                share = share if weight is None else share.mul_(weight)
                into = share if into is None else into.add_(share)
        assert into is not None
        into -= _exp(log_rows).mul_(into.sum(2, keepdim=True))
        grad_distance -= into.sum(1)
        grad_v += into.mul_(slope).sum(1)
    return grad_v, grad_distance / tau


def _serves(v: Tensor, distance: Tensor, k: Tensor, count: Tensor, *rest: Any) -> bool:
    floats = (x for x in rest if isinstance(x, Tensor))
    return is_float32(v, distance, *floats) and is_real(k) and is_real(count) and v.numel() > 0


def _buffers(v: Tensor, rows: int) -> tuple[Tensor, int]:
    """Return memory for a compiled loop, and the size of its rows."""
    size = -(-v.shape[1] // WIDTH) * WIDTH
    return torch.empty(number_of_parts(len(v)), rows, size), size


@neuralsort_masses.backend("numba", _serves)
def _masses_numba(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
) -> tuple[Tensor, Tensor]:
    given = [x.contiguous() for x in (v, distance, k, count)]
    log_u, log_d = torch.empty(v.shape), torch.empty(v.shape)
    memory = _buffers(v, MASS_ROWS)
    run_parts(_MASSES, len(v), v.shape[1], *given, 1.0 / tau, int(normalised), *memory, log_u, log_d)
    return log_u, log_d


@neuralsort_gradient.backend("numba", _serves)
def _gradient_numba(
    v: Tensor,
    distance: Tensor,
    k: Tensor,
    count: Tensor,
    log_u: Tensor,
    log_d: Tensor,
    grad_u: Tensor,
    grad_d: Tensor,
    tau: float,
    normalised: bool,
) -> tuple[Tensor, Tensor]:
    given = [x.contiguous() for x in (v, distance, k, count, log_u, log_d, grad_u, grad_d)]
    grad_v, grad_distance = torch.empty(v.shape), torch.empty(v.shape)
    memory = _buffers(v, GRADIENT_ROWS)
    run_parts(_GRADIENTS, len(v), v.shape[1], *given, 1.0 / tau, int(normalised), *memory, grad_v, grad_distance)
    return grad_v, grad_distance
