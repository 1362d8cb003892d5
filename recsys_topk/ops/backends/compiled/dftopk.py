"""The kernel of the DFTopK loss."""

from __future__ import annotations

from typing import Any

from recsys_topk.ops.backends.compiled.arithmetic import (
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
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import count, places, splat, total, where
from recsys_topk.ops.backends.compiled.losses import loss_kernel, loss_rows
from recsys_topk.ops.backends.compiled.memory import load, store, store_where
from recsys_topk.ops.backends.task import WIDTH


@inlined
def dftopk(
    task: Any, buffer: Any, gradient: Any, rank: Any, valid: Any, kept: Any, cut: Any, mean: Any, variance: Any, z: Any
) -> Any:
    """Return the loss of a list and write its gradient (see `loss_kernel`).

    With u = (x - b) / tau and t = s u, s = -1 for the true items and 1 for the others, the loss of an item is
    softplus(t) and its derivative s m / tau, m in [0, 1]: nothing cancels. The items at x_[k] and x_[k+1] receive
    -alpha and -(1 - alpha) of the sum of the derivatives, shared evenly among ties.

    The sum of log(1 + e_i) is log(1 + c), with 1 + c the product of the 1 + e_i.
    """
    n, size, steep = task.items, task.size, ONE / task.tau
    v, s, _ = loss_rows(buffer, size)
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
    return value / valid


dftopk_kernel = loss_kernel(dftopk)
