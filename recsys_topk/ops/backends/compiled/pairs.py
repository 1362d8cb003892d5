"""Sums over the pairs of items of a list, in loops that LLVM vectorises."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import INFINITY, ONE, TWO, ZERO, exp_negative, i32, log1p_unit
from recsys_topk.ops.backends.compiled.build import compiled

PAIR_ONES, PAIR_DIFFERENCES, PAIR_ROWS = 0, 1, 2  # positions in `recsys_topk.ops.losses.pair_sums.KINDS`


@compiled
def pair_weights(
    i: Any, kind: Any, first: Any, second: Any, discounts: Any, ranks: Any, swap: Any, mu: Any, k: Any, near: Any,
    deep: Any, part: Any, w: Any,
) -> None:  # fmt: skip
    """Write the weights of the pairs (i, j) of one list, all j, to w; see `recsys_topk.ops.losses.pair_sums`."""
    own = first[i]
    if kind == PAIR_ONES:
        for j in range(len(w)):
            w[j] = ONE if own > second[j] else ZERO
    elif kind == PAIR_ROWS:
        for j in range(len(w)):
            w[j] = own if second[j] < INFINITY else ZERO
    else:
        for j in range(len(w)):
            gap = own - second[j]
            w[j] = gap if gap > ZERO else ZERO
    if mu > ZERO:
        rank = ranks[i]
        for j in range(len(w)):
            part[j] = mu * near[np.uint32(TWO * abs(rank - ranks[j]))]
        if k < INFINITY:
            for j in range(len(w)):
                worse = rank if rank > ranks[j] else ranks[j]
                factor = deep[np.uint32(TWO * worse)]
                part[j] *= factor if worse > k else ONE
    elif swap:
        part[:] = ZERO
    if swap:
        d = discounts[i]
        for j in range(len(w)):
            w[j] *= part[j] + abs(d - discounts[j])
    elif mu > ZERO:
        for j in range(len(w)):
            w[j] *= part[j]


@compiled
def pair_lists(
    number: Any, begin: Any, end: Any, kind: Any, x: Any, first: Any, second: Any, discounts: Any, ranks: Any, mu: Any,
    ks: Any, near: Any, deep: Any, sigma: Any, wants: Any, buffers: Any, losses: Any, gradient: Any, finite: Any,
) -> None:  # fmt: skip
    """Write sum_ij w_ij log(1 + exp(-sigma (x_i - x_j))) and its gradient for lists begin <= b < end.

    Args:
        number: Number of the part.
        begin: First list.
        end: One past the last list.
        kind: PAIR_ONES, PAIR_DIFFERENCES or PAIR_ROWS.
        x: Scores, (B, N) float32.
        first: Values of the items i, (B, N) float32; -inf (PAIR_ROWS: 0) where an item is in no pair as the first.
        second: Values of the items j, (B, N) float32; inf where masked.
        discounts: (B, N) float32, or (0, 0): none.
        ranks: (B, N) float32, multiples of 1/2, or (0, 0): none.
        mu: Weight of delta (see `recsys_topk.ops.losses.pair_sums.PairWeights`); 0 without ranks.
        ks: k of delta, (B,) float32.
        near: delta, indexed by twice the distance of two ranks.
        deep: Factor of delta for ranks beyond k, indexed by twice the rank.
        sigma: Steepness.
        wants: Whether to write gradients.
        buffers: (parts, 7, N rounded up to a multiple of PADDED) float32, overwritten.
        losses: (B,) float32, written.
        gradient: (B, N) float32, written.
        finite: (parts,) bool, written: whether all scores are finite. Otherwise the rest is not written.
    """
    own_buffers = buffers[number]
    v, w, g, other, d, r, part = (
        own_buffers[0], own_buffers[1], own_buffers[2], own_buffers[3], own_buffers[4], own_buffers[5], own_buffers[6]
    )  # fmt: skip
    n = x.shape[1]
    swap, ranked = discounts.shape[0] > 0, ranks.shape[0] > 0
    own_buffers[:] = ZERO
    finite[number] = True
    other[:] = INFINITY
    for b in range(begin, end):
        total = ZERO
        for j in range(n):
            v[j] = x[b, j]
            total += abs(x[b, j])
        if not total < INFINITY:
            finite[number] = False
            return
        other[:n] = second[b]
        if swap:
            d[:n] = discounts[b]
        if ranked:
            r[:n] = ranks[b]
        g[:] = ZERO
        whole: Any = 0.0
        for i in range(n):
            if first[b, i] == -INFINITY or (kind == PAIR_ROWS and first[b, i] == ZERO):
                continue
            pair_weights(i, kind, first[b], other, d, r, swap, mu, ks[b], near, deep, part, w)
            own, terms, pull = v[i], ZERO, ZERO
            for j in range(len(v)):
                t = sigma * (v[j] - own)
                e = exp_negative(-abs(t))
                terms += w[j] * ((t if t > ZERO else ZERO) + log1p_unit(e))
                m = w[j] * (ONE if t >= ZERO else e) / (ONE + e)
                pull += m
                g[j] += m
            whole += terms
            g[i] -= pull
        losses[b] = whole
        if wants:
            for j in range(n):
                gradient[b, j] = sigma * g[j]


@compiled
def count_lists(number: Any, begin: Any, end: Any, first: Any, second: Any, counts: Any) -> None:
    """Write the number of pairs with first_i > second_j for lists begin <= b < end; first_i = -inf is in no pair."""
    n = first.shape[1]
    for b in range(begin, end):
        found: Any = 0
        for i in range(n):
            own = first[b, i]
            if own > -INFINITY:
                below = i32(0)
                for j in range(n):
                    below += i32(own > second[b, j])
                found += below
        counts[b] = found
