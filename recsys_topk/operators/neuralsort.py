"""NeuralSort: the mass of an item in the first k rows of a relaxed permutation matrix."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_not_negative
from recsys_topk.numerics import add_eps, is_full, log1mexp, masked_logsumexp
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
from recsys_topk.ops.selection.sorting import share_ties, sort_descending

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
        x = share_ties(filled)
        _, order = sort_descending(x)
        sorted_scores = _centred(x.gather(1, order), count)
        masses = closed_form(_Masses, _masses, *sorted_scores, ks, count, self.tau, self.normalised)
        back = torch.empty_like(order).scatter(1, order, torch.arange(order.shape[1], device=device).expand_as(order))
        log_u, log_d = (mass.gather(1, back) for mass in masses)
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
    """The backward computes the rows again."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, distance: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        masses = neuralsort_masses(v, distance, *rest)
        ctx.save_for_backward(v, distance, *masses)
        ctx.rest = rest
        return masses

    @staticmethod
    def backward(ctx: Any, grad_u: Tensor, grad_d: Tensor) -> tuple[Tensor | None, ...]:
        v, distance, log_u, log_d = ctx.saved_tensors
        if wants_graph():
            return through_reference(_masses, (v, distance, *ctx.rest), (grad_u, grad_d))
        k, count, *rest = ctx.rest
        return *neuralsort_gradient(v, distance, k, count, log_u, log_d, grad_u, grad_d, *rest), *[None] * 4


def _centred(values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values minus their mean (0 where masked) and the sum of distances of each (inf where masked).

    Rows are invariant to a shift of the scores, and float32 sums of centred values are much more accurate. In
    descending order, sums of distances are cumulative sums.
    """
    n, ranks = count[:, None], torch.arange(1, values.shape[1] + 1, device=values.device)
    valid = ranks <= n
    v = torch.where(valid, values, 0.0)
    v = torch.where(valid, v - v.detach().sum(1, keepdim=True) / n, 0.0)
    sums = v.cumsum(1)
    distance = v * (n - 2 * ranks) + 2.0 * sums - sums[:, -1:]
    return v, torch.where(valid, distance, math.inf)


def _log_rows(v: Tensor, distance: Tensor, count: Tensor, numbers: Tensor, tau: float) -> Tensor:
    """Return the logarithms of rows `numbers` of the relaxed permutation, (B, R, N)."""
    slope = ((count[:, None] + 1 - 2 * numbers).to(v.dtype) / tau)[:, :, None]
    return torch.log_softmax(slope * v[:, None, :] - distance[:, None, :] / tau, dim=2)


def _sides(distance: Tensor, k: Tensor, count: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return which entries of rows `numbers` are part of U and of D, boolean (B, R, N) each."""
    row, valid = numbers[:, None], torch.isfinite(distance)[:, None, :]
    first = row <= k[:, None, None]
    return first & valid, ~first & (row <= count[:, None, None]) & valid


def _masses(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, tau: float, normalised: bool, numbers: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return log U and log D of some rows (None = all), (B, N) each. Differentiable to any order; R n memory."""
    rows = torch.arange(1, v.shape[1] + 1, device=v.device) if numbers is None else numbers
    log_rows, (first, rest) = _log_rows(v, distance, count, rows, tau), _sides(distance, k, count, rows)
    log_u = masked_logsumexp(log_rows, first, dim=1)
    return log_u, masked_logsumexp(log_rows, rest, dim=1) if normalised else torch.full_like(log_u, -math.inf)


def _chunks(v: Tensor, k: Tensor, normalised: bool) -> tuple[Tensor, ...]:
    """Return the numbers of all needed rows, in chunks."""
    last = int(k.max()) if not normalised and may_read(k) and len(k) else v.shape[1]
    return torch.split(torch.arange(1, last + 1, device=v.device), max(1, CHUNK // max(1, v.numel())))


@operation
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
    log_u = log_d = torch.full_like(v, -math.inf)
    for numbers in _chunks(v, k, normalised):
        more_u, more_d = _masses(v, distance, k, count, tau, normalised, numbers)
        log_u, log_d = torch.logaddexp(log_u, more_u), torch.logaddexp(log_d, more_d)
    return log_u, log_d


@operation
def neuralsort_gradient(
    v: Tensor, distance: Tensor, k: Tensor, count: Tensor, log_u: Tensor, log_d: Tensor, grad_u: Tensor,
    grad_d: Tensor, tau: float, normalised: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `neuralsort_masses` with respect to `v` and `distance`, (B, N) each.

    The derivative of log U is that of sum_r exp(L_r - log U) with a constant log U, L_r the logarithm of row r.
    """
    grad_v, grad_distance = torch.zeros_like(v), torch.zeros_like(v)
    inputs = (v.detach().requires_grad_(), distance.detach().requires_grad_())
    for numbers in _chunks(v, k, normalised):
        with torch.enable_grad():
            log_rows, total = _log_rows(*inputs, count, numbers, tau), v.new_zeros(())
            sides = zip((log_u, log_d), (grad_u, grad_d), _sides(distance, k, count, numbers), strict=True)
            for log_mass, grad, inside in list(sides)[: 2 if normalised else 1]:
                shares = torch.exp(torch.where(inside, log_rows - log_mass[:, None, :], -math.inf))
                total = total + (shares * grad[:, None, :]).sum()
            for into, part in zip((grad_v, grad_distance), torch.autograd.grad(total, inputs), strict=True):
                into += part
    return grad_v, grad_distance


def _serves(v: Tensor, distance: Tensor, k: Tensor, count: Tensor, *rest: Any) -> bool:
    floats = (x for x in rest if isinstance(x, Tensor))
    return is_float32(v, distance, *floats) and is_real(k) and is_real(count) and v.numel() > 0


def _run(loop: Loop, rows: int, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Run a compiled loop with a buffer of `rows` rows; return its two results."""
    *tensors, tau, normalised = rest
    size, results = -(-v.shape[1] // WIDTH) * WIDTH, torch.empty(2, *v.shape)
    buffers, given = torch.empty(number_of_parts(len(v)), rows, size), [x.contiguous() for x in (v, *tensors)]
    run_parts(loop, len(v), v.shape[1], *given, 1.0 / tau, int(normalised), buffers, size, results[0], results[1])
    return results[0], results[1]


neuralsort_masses.backend("numba", _serves)(partial(_run, _MASSES, MASS_ROWS))
neuralsort_gradient.backend("numba", _serves)(partial(_run, _GRADIENTS, GRADIENT_ROWS))
