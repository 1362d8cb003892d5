"""The loop of the DFTopK loss."""

from __future__ import annotations

from typing import Any

from recsys_topk.ops.compiled.arithmetic import (
    INFINITY,
    ONE,
    PRODUCT,
    ZERO,
    below_zero,
    exp_negative,
    f32,
    i32,
    log1p_positive,
)
from recsys_topk.ops.compiled.build import inlined
from recsys_topk.ops.compiled.lanes import count, places, splat, total, where
from recsys_topk.ops.compiled.memory import load, store, store_where
from recsys_topk.ops.compiled.selection import begin_list
from recsys_topk.ops.compiled.tasks import end_list, over_lists, rows_of, wanted_of
from recsys_topk.ops.task import WIDTH


@inlined
def dftopk_list(task: Any, b: Any, buffer: Any) -> Any:
    """Write the loss of list b and its gradient; return the state of `begin_list`, and the loss.

    With u = (x - b) / tau and t = s u, s = -1 for the true items and 1 for the others, the loss of an item is
    softplus(t) and its derivative s m / tau, m in [0, 1]: nothing cancels. The items at x_[k] and x_[k+1] receive
    -alpha and -(1 - alpha) of the sum of the derivatives, shared evenly among ties.

    The sum of log(1 + e_i) is log(1 + c), with 1 + c the product of the 1 + e_i.
    """
    n, size, steep = task.items, task.size, ONE / task.tau
    normal, v, s, w = buffer, buffer + 64, buffer + 64 + 4 * size, buffer + 64 + 8 * size
    x, y, mask, gradient = rows_of(task, b)
    state, _, valid, kept, cut, _, _ = begin_list(
        task.law, x, y, mask, n, size, wanted_of(task, b), -1, task.above, v, s, w, normal
    )
    if state != 1:
        return end_list(task, b, state, 0.0)
    alpha = task.alpha
    base = cut + alpha * (kept - cut)
    value, pull, kepts, cuts = 0.0, 0.0, i32(0), i32(0)
    for start in range(0, size, PRODUCT):
        terms, slopes, product = splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            at, sign = load(v, i), load(s, i)
            t = (at - base) * steep * sign
            e = exp_negative(below_zero(t))
            m = sign * where(t >= ZERO, ONE, e) / (e + ONE)
            store(s, i, m)
            slopes = slopes + m
            terms = terms + where(t > ZERO, t, ZERO)
            product = product * e + (product + e)
            kepts += count(at == kept)
            cuts += count(at == cut)
        value += total(terms + log1p_positive(product))
        pull += total(slopes)
    if gradient != 0:
        rate = task.scale * steep / f32(valid)
        at_kept = -alpha * f32(pull) / f32(kepts)
        at_cut = (alpha - ONE) * f32(pull) / f32(cuts)
        for i in range(0, size, WIDTH):
            at = load(v, i)
            moved = load(s, i) + where(at == kept, at_kept, ZERO) + where(at == cut, at_cut, ZERO)
            store_where(gradient, i, where(at > -INFINITY, moved * rate, ZERO), places(i32(i)) < i32(n))
    return end_list(task, b, state, value / valid)


dftopk_lists = over_lists(dftopk_list)
