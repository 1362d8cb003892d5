"""The kernels of the losses of the laws DFTOPK, LOGISTIC and LAPLACE."""

from __future__ import annotations

import math
from typing import Any

from recsys_topk.ops.backends.compiled.arithmetic import (
    INFINITY,
    ONE,
    PRODUCT,
    ZERO,
    f32,
    i32,
    log1p_positive,
    log1p_unit,
)
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import count, places, splat, total, where
from recsys_topk.ops.backends.compiled.laws import law_moves, law_terms, law_threshold
from recsys_topk.ops.backends.compiled.losses import loss_kernel, loss_rows
from recsys_topk.ops.backends.compiled.memory import load, store, store_where
from recsys_topk.ops.backends.compiled.thresholds import distance
from recsys_topk.ops.backends.task import DFTOPK, LAPLACE, LOGISTIC, WIDTH


@inlined
def membership_loss(law: Any, task: Any, buffer: Any, q: Any, gradient: Any, facts: Any) -> Any:
    """Return the loss of a list and write its gradient (see `loss_kernel`).

    Without weights, the sum of log(1 + f_i) is log(1 + c), with 1 + c the product of the 1 + f_i.
    """
    n, size, steep, alpha = task.items, task.size, ONE / task.tau, task.alpha
    kept, cut = facts.kept, facts.cut
    v, s, w, _ = loss_rows(buffer, size)
    base, at, near = law_threshold(law, task, v, q, facts)
    unit = ONE if law == DFTOPK else f32(math.exp(-near))
    value, pull, weight, amount, kepts, cuts = 0.0, 0.0, 0.0, 0.0, i32(0), i32(0)
    for start in range(0, size, PRODUCT):
        terms, slopes, density, product, parts = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            score, sign = load(v, i), load(s, i)
            logit = distance(score, base, at) * steep
            factor, slope, _, share = law_terms(law, logit, sign, near, unit)
            t = logit * sign
            hinge = where(t > ZERO, t, ZERO)
            if q != 0:
                own = load(q, i)
                part = own * where(sign < ZERO, ONE, task.others)
                terms = terms + (hinge + log1p_unit(factor)) * part
                slope, share, parts = slope * part, share * own, parts + part
            else:
                product = product * factor + (product + factor)
                terms = terms + hinge
            slopes = slopes + slope
            store(s, i, slope)
            if law != DFTOPK:
                density = density + share
                store(w, i, share)
            elif q == 0:
                kepts += count(score == kept)
                cuts += count(score == cut)
        value += total(terms + log1p_positive(product))
        pull += total(slopes)
        weight += total(density)
        amount += total(parts)
    if q == 0:
        amount = facts.amount
    if gradient != 0:
        rate, pulled = task.scale * steep / f32(amount), f32(pull)
        at_kept, at_cut = f32(pull / weight), ZERO
        if law == DFTOPK:
            at_kept = pulled * alpha / (facts.at_kept if q != 0 else f32(kepts))
            at_cut = pulled * (ONE - alpha) / (facts.at_cut if q != 0 else f32(cuts))
        for i in range(0, size, WIDTH):
            score = load(v, i)
            moves = law_moves(law, score, load(w, i), kept, cut, at_kept, at_cut)
            if law == DFTOPK and q != 0:
                moves = moves * load(q, i)
            moved = (load(s, i) - moves) * rate
            store_where(gradient, i, where(score > -INFINITY, moved, ZERO), places(i32(i)) < i32(n))
    return value / amount


dftopk_kernel, logistic_kernel, laplace_kernel, dftopk_weighted, logistic_weighted, laplace_weighted = (
    loss_kernel(law, membership_loss, weighted) for weighted in (False, True) for law in (DFTOPK, LOGISTIC, LAPLACE)
)
