"""The kernel of the losses of the logistic and the Laplace membership, which sum to k."""

from __future__ import annotations

import math
from typing import Any

from recsys_topk.ops.backends.compiled.arithmetic import (
    INFINITY,
    ONE,
    PRODUCT,
    TWO,
    ZERO,
    exp_negative,
    f32,
    i32,
    log1p_positive,
    magnitude,
)
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import places, splat, total, where
from recsys_topk.ops.backends.compiled.losses import loss_kernel, loss_rows
from recsys_topk.ops.backends.compiled.memory import load, store, store_where
from recsys_topk.ops.backends.compiled.thresholds import distance, threshold
from recsys_topk.ops.backends.task import LOGISTIC, WIDTH


@inlined
def sums_to_k(
    task: Any, buffer: Any, gradient: Any, rank: Any, valid: Any, kept: Any, cut: Any, mean: Any, variance: Any, z: Any
) -> Any:
    """Return the loss of a list under the LOGISTIC or LAPLACE law and write its gradient (see `loss_kernel`).

    The loss of an item is softplus(t), or -log F(-t) for the Laplace law. The derivative of the
    threshold b with respect to a score is the share of the item in the density, w_i / sum_j w_j. Distances are relative
    to the nearest item, so that the shares are finite however far all items are.
    """
    n, size, law, tau = task.items, task.size, task.law, task.tau
    v, s, w = loss_rows(buffer, size)
    steep = ONE / tau
    at, near = threshold(law, v, size, valid, rank, cut, kept - cut, mean, variance, z, tau)
    unit = f32(math.exp(-near))
    value, pull, weight = 0.0, 0.0, 0.0
    for start in range(0, size, PRODUCT):
        terms, slopes, density, product = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            sign = load(s, i)
            u = distance(load(v, i), cut, at) * steep
            t = u * sign
            share = exp_negative(near - magnitude(u))
            e = share * unit
            if law == LOGISTIC:
                inverse = ONE / (e + ONE)
                m = where(t >= ZERO, ONE, e) * inverse
                share = share * (inverse * inverse)
                factor = e
            else:
                m = where(t >= ZERO, ONE, e / (TWO - e))
                factor = m
            product = product * factor + (product + factor)
            terms = terms + where(t > ZERO, t, ZERO)
            slopes = slopes + m * sign
            density = density + share
            store(s, i, m * sign)
            store(w, i, share)
        value += total(terms + log1p_positive(product))
        pull += total(slopes)
        weight += total(density)
    if gradient != 0:
        rate, part = task.scale * steep / f32(valid), f32(pull / weight)
        for i in range(0, size, WIDTH):
            moved = (load(s, i) - load(w, i) * part) * rate
            store_where(gradient, i, where(load(v, i) > -INFINITY, moved, ZERO), places(i32(i)) < i32(n))
    return value / valid


sums_to_k_kernel = loss_kernel(sums_to_k)
