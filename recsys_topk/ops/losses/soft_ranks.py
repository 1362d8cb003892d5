"""Soft ranks: 1 plus the logistic comparisons of an item with all other items of its list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import closed_form, is_float32, is_real, operation, through_reference, wants_graph
from recsys_topk.ops.losses.pair_spans import better_items, spans

ROWS = 7  # of the buffer of the compiled loop
_COMPARISONS = Loop("recsys_topk.ops.backends.compiled.comparisons:rank_comparisons")


def soft_ranks(scores: Tensor, wanted: Tensor, mask: Tensor, tau: float, weights: Tensor | None = None) -> Tensor:
    """Return r_i = 1 + sum over valid j != i of s((x_j - x_i) / tau), s the logistic function, (B, N), differentiable.

    With item weights, r_i = 1 - min(w_i, 1) / 2 + sum over valid j of w_j s((x_j - x_i) / tau): an item of weight w has
    w copies, and none if w is below 1.

    Takes O(p N) time for p wanted items, or O(N^2 / 2) if that is less, and O(N) memory beyond a buffer of fixed size.

    Args:
        scores: (B, N).
        wanted: Boolean (B, N), valid items. The others get 1.
        mask: Boolean (B, N).
        tau: Temperature.
        weights: (B, N), w; None = all 1.

    Example:
        >>> every = torch.ones(1, 2, dtype=torch.bool)
        >>> soft_ranks(torch.tensor([[1.0, 1.0]]), every, every, 1.0)
        tensor([[1.5000, 1.5000]])
    """
    found: Tensor = closed_form(_SoftRanks, _formula, scores, wanted, mask, tau, weights)
    return found


class _SoftRanks(torch.autograd.Function):
    """The backward computes the comparisons again."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, wanted: Tensor, mask: Tensor, tau: float, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(scores, wanted, mask, weights)
        ctx.tau = tau
        return rank_values(scores, wanted, mask, tau, weights)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scores, wanted, mask, weights = ctx.saved_tensors
        if wants_graph():
            return through_reference(_formula, (scores, wanted, mask, ctx.tau, weights), [upstream])
        return rank_gradient(scores, wanted, mask, upstream.contiguous(), ctx.tau, weights), None, None, None, None


def _formula(scores: Tensor, wanted: Tensor, mask: Tensor, tau: float, weights: Tensor | None) -> Tensor:
    rows = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    found = _copies(_comparisons(scores, rows, mask, tau, slice(None)), weights, slice(None)).sum(2)
    return torch.where(wanted, found + _itself(weights), 1.0)


def _comparisons(scores: Tensor, rows: Tensor, mask: Tensor, tau: float, span: slice) -> Tensor:
    """Return the soft comparison s((x_j - x_i) / tau) of items j and i, (b, P, N); 0 where j is masked."""
    x = scores[span]
    p = torch.sigmoid((x[:, None, :] - x.gather(1, rows[span])[:, :, None]) / tau)
    return p if is_full(mask) else p * mask[span, None, :]


def _copies(p: Tensor, weights: Tensor | None, span: slice) -> Tensor:
    return p if weights is None else p * weights[span, None, :]


def _itself(weights: Tensor | None) -> Tensor | float:
    """Return 1 minus the comparison of an item with itself, which the sum over all items has."""
    return 0.5 if weights is None else 1.0 - 0.5 * weights.clamp_max(1.0)


@operation(fake=lambda scores, *_: torch.empty_like(scores))
def rank_values(scores: Tensor, wanted: Tensor, mask: Tensor, tau: float, weights: Tensor | None) -> Tensor:
    """Return the result of `soft_ranks`, without a gradient."""
    rows, ranks = better_items(wanted), torch.empty_like(scores)
    for span in spans(scores, rows):
        found = _copies(_comparisons(scores, rows, mask, tau, span), weights, span).sum(2)
        ranks[span] = torch.ones_like(ranks[span]).scatter(1, rows[span], found)
    return torch.where(wanted, ranks + _itself(weights), 1.0)


@operation(fake=lambda scores, *_: torch.empty_like(scores))
def rank_gradient(
    scores: Tensor, wanted: Tensor, mask: Tensor, upstream: Tensor, tau: float, weights: Tensor | None
) -> Tensor:
    """Return the gradient of the scores from that of the ranks, (B, N)."""
    rows, gradient = better_items(wanted), torch.empty_like(scores)
    pulls = torch.where(wanted, upstream, 0.0).gather(1, rows)
    for span in spans(scores, rows):
        p = _comparisons(scores, rows, mask, tau, span)
        push = _copies(p * (1.0 - p), weights, span) * pulls[span, :, None]
        gradient[span] = push.sum(1).scatter_add(1, rows[span], -push.sum(2))
    return gradient / tau


def _serves(scores: Tensor, wanted: Tensor, mask: Tensor, *rest: Any) -> bool:
    floats = (x for x in rest if isinstance(x, Tensor))
    return is_float32(scores, *floats) and is_real(wanted) and is_real(mask) and scores.numel() > 0


def _run(
    scores: Tensor, wanted: Tensor, mask: Tensor, upstream: Tensor | None, tau: float, weights: Tensor | None
) -> Tensor:
    lists, n = scores.shape
    size, result = -(-n // WIDTH) * WIDTH, torch.empty(lists, n)
    buffers = torch.empty(number_of_parts(lists), ROWS, size)
    real = None if is_full(mask) else mask.contiguous()
    items = None if weights is None else weights.contiguous()
    given = (scores.detach().contiguous(), wanted.contiguous(), real, items, upstream)
    run_parts(_COMPARISONS, lists, n, int(upstream is not None), *given, 1.0 / tau, buffers, size, result)
    return result


@rank_values.backend("numba", _serves)
def _values_numba(scores: Tensor, wanted: Tensor, mask: Tensor, tau: float, weights: Tensor | None) -> Tensor:
    return _run(scores, wanted, mask, None, tau, weights)


@rank_gradient.backend("numba", _serves)
def _gradient_numba(
    scores: Tensor, wanted: Tensor, mask: Tensor, upstream: Tensor, tau: float, weights: Tensor | None
) -> Tensor:
    return _run(scores, wanted, mask, upstream.contiguous(), tau, weights)
