"""NeuralSort: the mass that an item has in the first k rows of a relaxed permutation matrix."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from recsys_topk.numerics import count_true, fill_masked, is_full, log1mexp
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.operators.opaque import opaque
from recsys_topk.operators.ordering import average_ties, sort_descending

# Rows of the relaxed permutation are made in chunks of about this many entries: they stay in the cache.
CHUNK = 2**18


class NeuralSort(TopKOperator):
    """Top-k mass of NeuralSort's relaxed permutation, without its n x n matrix.

    Row r is softmax_i(((n + 1 - 2 r) x_i - sum_j |x_i - x_j|) / tau); U_i is the mass of item i in rows 1..k, D_i in
    the rows after. Rows sum to 1, columns do not. Two forms:

    - normalised (the default, and what the loss uses): p = U / C and 1 - p = D / C with C = U + D held constant, so
      that log p and log(1 - p) carry the gradients of U and of D (the form of LCRON). Needs all rows: n^2 time.
    - plain: p = U, which sums to k and may exceed 1; log(1 - p) is -inf, with zero gradient, where it does. Needs
      the first k rows: k n time.

    Both use O(n) memory: rows are made in chunks and made again in the backward pass. Masses are summed as
    logarithms, so that they do not underflow at small tau.

    Args:
        tau: Temperature.
        normalised: Which form.
        validate: Raise on NaN or infinity among valid scores.

    Example:
        >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> NeuralSort(normalised=False)(x, k=2).p.round(decimals=3)
        tensor([[0.9310, 0.2230, 0.8350, 0.0110]])
        >>> NeuralSort()(x, k=2).p.round(decimals=3)
        tensor([[0.9890, 0.2110, 0.7890, 0.0110]])
    """

    name: ClassVar[str] = "neuralsort"
    cost: ClassVar[str] = "n^2"
    sums_to_k: ClassVar[bool] = False
    exact_gradient: ClassVar[bool] = False
    paper: ClassVar[str] = "Grover et al. 2019, arXiv 1903.08850"

    def __init__(self, tau: float = 1.0, normalised: bool = True, *, validate: bool = False) -> None:
        super().__init__(tau, validate=validate)
        self.normalised = normalised

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        full = is_full(mask)
        filled = scores if full else fill_masked(scores, mask, -math.inf)
        shape, device = scores.shape[:1], scores.device
        ks = k if isinstance(k, Tensor) else torch.full(shape, k, device=device)
        count = torch.full(shape, scores.shape[1], device=device) if full else count_true(mask)
        log_u, log_d = _Masses.apply(filled, ks, count, self.tau, self.normalised)  # type: ignore[no-untyped-call]
        if not self.normalised:
            return SoftSelection(log_u, log1mexp(log_u.clamp_max(0.0)), mask)
        log_c = torch.logaddexp(log_u, log_d).detach()
        if not full:
            log_c = torch.where(mask, log_c, 0.0)
        return SoftSelection(log_u - log_c, log_d - log_c, mask)

    def extra_repr(self) -> str:
        """Show the temperature and the form."""
        return super().extra_repr() + ("" if self.normalised else ", normalised=False")


class _Masses(torch.autograd.Function):
    """log U and log D, computed in the order of the scores, where sums of distances are cumulative sums."""

    @staticmethod
    def forward(
        ctx: Any, filled: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
    ) -> tuple[Tensor, Tensor]:
        values, order = sort_descending(filled)
        v, distance = _centred(values, count)
        log_u, log_d = neuralsort_masses(v, distance, k, count, tau, normalised)
        ctx.save_for_backward(values, order, k, count, log_u, log_d)
        ctx.tau, ctx.normalised = tau, normalised
        back = _inverse(order)
        return log_u.gather(1, back), log_d.gather(1, back)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_u: Tensor, grad_d: Tensor) -> tuple[Tensor, None, None, None, None]:
        values, order, k, count, log_u, log_d = ctx.saved_tensors
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
        # distance_i = sum_j |v_i - v_j| in descending order: item i is above n - i items and below i - 1.
        ranks = torch.arange(1, v.shape[1] + 1, device=v.device)
        through = grad_distance.cumsum(1)
        both_sides = 2.0 * through - grad_distance - through[:, -1:]
        grad = grad_v + grad_distance * (count[:, None] + 1 - 2 * ranks) - both_sides
        grad = torch.where(ranks <= count[:, None], grad, 0.0)
        return average_ties(values, grad).gather(1, _inverse(order)), None, None, None, None


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _centred(values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values less their mean (0 where masked) and the sum of distances of each (inf where masked).

    Rows are invariant to a shift of the scores; in float32 the sums are much more accurate around 0.
    """
    n, ranks = count[:, None], torch.arange(1, values.shape[1] + 1, device=values.device)
    valid = ranks <= n
    v = torch.where(valid, values, 0.0)
    v = torch.where(valid, v - v.sum(1, keepdim=True) / n, 0.0)
    sums = v.cumsum(1)
    distance = v * (n - 2 * ranks) + 2.0 * sums - sums[:, -1:]
    return v, torch.where(valid, distance, math.inf)


def _chunks(v: Tensor, k: Tensor, count: Tensor, normalised: bool) -> list[tuple[Tensor, bool | None]]:
    """Return the row numbers of each chunk, and whether they all are among the first k (None = some, of some lists)."""
    rows = int((count if normalised else k).max())
    low, high = int(k.min()), int(k.max())
    size = max(1, CHUNK // max(1, v.numel()))
    chunks: list[tuple[Tensor, bool | None]] = []
    for start, stop, inside in ((0, low, True), (low, high, None), (high, rows, False)):
        for first in range(start, stop, size):
            numbers = torch.arange(first + 1, min(first + size, stop) + 1, device=v.device)
            chunks.append((numbers, inside))
    return chunks


def _log_rows(v: Tensor, distance: Tensor, count: Tensor, numbers: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return the logarithms of rows `numbers` of the relaxed permutation, (B, R, N), and their slopes, (B, R, 1)."""
    slope = ((count[:, None] + 1 - 2 * numbers).to(v.dtype) / tau)[:, :, None]
    logits = torch.addcmul(distance[:, None, :] * (-1.0 / tau), slope, v[:, None, :])
    return torch.log_softmax(logits, dim=2), slope


def _fake_masses(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(v)


@opaque(_fake_masses)
def neuralsort_masses(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Return log U and log D (-inf in the plain form), (B, N) in descending order of the scores.

    Args:
        v: (B, N), centred scores, descending, 0 where masked.
        distance: (B, N), the sum of distances of each to the others, inf where masked.
        k: (B,) int64, 1 <= k < count.
        count: (B,) int64, valid items; they come first.
        tau: Temperature.
        normalised: Whether the rows after the k-th are needed.
    """
    log_u, log_d = torch.full_like(v, -math.inf), torch.full_like(v, -math.inf)
    for numbers, inside in _chunks(v, k, count, normalised):
        log_rows, _ = _log_rows(v, distance, count, numbers, tau)
        if inside is not False:
            chosen = log_rows if inside else torch.where(numbers[:, None] <= k[:, None, None], log_rows, -math.inf)
            log_u = _log_add(log_u, chosen)
        if normalised and not inside:
            chosen = (numbers[:, None] > k[:, None, None]) & (numbers[:, None] <= count[:, None, None])
            log_d = _log_add(log_d, torch.where(chosen, log_rows, -math.inf))
    return log_u, log_d


def _log_add(total: Tensor, log_rows: Tensor) -> Tensor:
    return torch.logaddexp(total, log_rows[:, 0] if log_rows.shape[1] == 1 else torch.logsumexp(log_rows, 1))


def _fake_gradient(v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(v)


@opaque(_fake_gradient)
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
    for numbers, inside in _chunks(v, k, count, normalised):
        log_rows, slope = _log_rows(v, distance, count, numbers, tau)
        if inside:
            into = (log_rows - safe_u[:, None, :]).exp_().mul_(grad_u[:, None, :])
        else:
            first = numbers[:, None] <= k[:, None, None]
            into = torch.where(first, (log_rows - safe_u[:, None, :]).exp_() * grad_u[:, None, :], 0.0)
            if normalised:
                later = ~first & (numbers[:, None] <= count[:, None, None])
                into += torch.where(later, (log_rows - safe_d[:, None, :]).exp_() * grad_d[:, None, :], 0.0)
        into -= log_rows.exp_().mul_(into.sum(2, keepdim=True))
        grad_distance -= into.sum(1)
        grad_v += into.mul_(slope).sum(1)
    return grad_v, grad_distance / tau
