"""The likelihood of the order of labels under the Plackett-Luce model of the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import is_float32, is_real, operation, under_transform
from recsys_topk.ops.losses.known_gradient import known_gradient
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.ranks import descending_order, packed_order, tie_groups

_LISTS = Loop("recsys_topk.ops.backends.compiled.scans:plackett_luce_lists")


@operation
def plackett_luce(scores: Tensor, labels: Tensor, terms: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return sum over the terms i of w_i (log sum_{j: y_j <= y_i} w_j exp(x_j) - x_i) of each list, (B,).

    Args:
        scores: (B, N).
        labels: (B, N).
        terms: Boolean (B, N), valid items.
        mask: Boolean (B, N).
        weights: (B, N), w; None = all 1.

    Example:
        >>> every = torch.ones(1, 2, dtype=torch.bool)
        >>> plackett_luce(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), every, every)
        tensor([0.6931])
    """
    order = descending_order(labels, mask)
    ordered, chosen = labels.gather(1, order), terms.gather(1, order)
    copies = None if weights is None else weights.gather(1, order)

    def formula(x: Tensor) -> Tensor:
        # Masked scores are very low instead of -inf, because logcumsumexp has no derivative at -inf.
        low = torch.finfo(x.dtype).min / 4
        return _with_gradient(torch.where(mask, x, low).gather(1, order), ordered, chosen, copies)[0]

    if under_transform():
        return formula(scores)
    x = torch.where(mask, scores.detach(), -math.inf).gather(1, order)
    value, gradient = _with_gradient(x, ordered, chosen, copies)
    return known_gradient(scores, value, torch.zeros_like(gradient).scatter_(1, order, gradient), formula)


def _with_gradient(x: Tensor, labels: Tensor, terms: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss, (B,), and its gradient, (B, N), of lists sorted by descending label. Masked scores are -inf.

    With R_i the items whose label is not larger than that of i and c_i = logsumexp of x + log w over R_i, L = sum of
    w_i (c_i - x_i) over the terms, and dL/dx_j = sum over terms i with j in R_i of w_i w_j exp(x_j - c_i), minus w_j if
    j is a term. Both are cumulative sums, computed in logarithms to avoid underflow.
    """
    first, last = tie_groups(labels[:, 1:] != labels[:, :-1])
    if weights is None:
        weights, logarithm = torch.ones_like(x), torch.zeros_like(x)
    else:  # finite, because logcumsumexp has no derivative at -inf
        logarithm = weights.log().clamp_min(torch.finfo(x.dtype).min / 4)
    rest = (x + logarithm).flip(-1).logcumsumexp(-1).flip(-1).gather(1, first)
    value = torch.where(terms, (rest - x) * weights, 0.0).sum(-1)
    pressure = torch.where(terms, logarithm - rest, -math.inf).logcumsumexp(-1).gather(1, last)
    return value, torch.exp(x + logarithm + pressure) - terms.to(x.dtype) * weights


def _serves(scores: Tensor, labels: Tensor, terms: Tensor, mask: Tensor, weights: Tensor | None = None) -> bool:
    floats = (scores, labels) if weights is None else (scores, labels, weights)
    return is_float32(*floats) and is_real(terms) and is_real(mask) and scores.numel() > 0


@plackett_luce.backend("numba", _serves)
def _numba(scores: Tensor, labels: Tensor, terms: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    order = packed_order(labels, mask)
    if order is None:
        return plackett_luce.reference(scores, labels, terms, mask, weights)
    lists, n = scores.shape
    size, parts = -(-n // WIDTH) * WIDTH, number_of_parts(lists)
    value, gradient = torch.empty(lists), torch.empty(lists, n)
    buffers, known = torch.empty(parts, 2, size), torch.empty(parts, dtype=torch.uint8)
    valid = torch.full((lists,), n) if is_full(mask) else count_true(mask)
    items = None if weights is None else weights.contiguous()
    given = (scores.detach().contiguous(), labels.contiguous(), terms.contiguous(), items, order, valid, buffers, size)
    run_parts(_LISTS, lists, n, *given, value, gradient, known)
    if not bool(known.all()):  # sums of numbers that differ more are computed in logarithms
        return plackett_luce.reference(scores, labels, terms, mask, weights)
    wants = scores.requires_grad and torch.is_grad_enabled()
    return known_gradient(
        scores, value, gradient if wants else None, lambda x: plackett_luce.reference(x, labels, terms, mask, weights)
    )
