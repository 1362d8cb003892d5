"""The kernels of the losses of the laws DFTOPK, LOGISTIC and LAPLACE."""

from __future__ import annotations

import math
from typing import Any

from recsys_topk.ops.backends.compiled.arithmetic import INFINITY, ONE, PRODUCT, ZERO, f32, i32, log1p_positive
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import count, places, splat, total, where
from recsys_topk.ops.backends.compiled.laws import law_moves, law_terms, law_threshold
from recsys_topk.ops.backends.compiled.losses import loss_kernel, loss_rows
from recsys_topk.ops.backends.compiled.memory import load, store, store_where
from recsys_topk.ops.backends.compiled.thresholds import distance
from recsys_topk.ops.backends.task import DFTOPK, LAPLACE, LOGISTIC, WIDTH


@inlined
def membership_loss(
    law: Any, task: Any, buffer: Any, gradient: Any, rank: Any, valid: Any, kept: Any, cut: Any, mean: Any,
    variance: Any, z: Any,
) -> Any:  # fmt: skip
    """Return the loss of a list and write its gradient (see `loss_kernel`).

    The sum of log(1 + f_i) is log(1 + c), with 1 + c the product of the 1 + f_i.
    """
    n, size, steep, alpha = task.items, task.size, ONE / task.tau, task.alpha
    v, s, w = loss_rows(buffer, size)
    base, at, near = law_threshold(law, task, v, rank, valid, kept, cut, mean, variance, z)
    unit = ONE if law == DFTOPK else f32(math.exp(-near))
    value, pull, weight, kepts, cuts = 0.0, 0.0, 0.0, i32(0), i32(0)
    for start in range(0, size, PRODUCT):
        terms, slopes, density, product = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            score, sign = load(v, i), load(s, i)
            logit = distance(score, base, at) * steep
            factor, slope, _, share = law_terms(law, logit, sign, near, unit)
            t = logit * sign
            product = product * factor + (product + factor)
            terms = terms + where(t > ZERO, t, ZERO)
            slopes = slopes + slope
            store(s, i, slope)
            if law == DFTOPK:
                kepts += count(score == kept)
                cuts += count(score == cut)
            else:
                density = density + share
                store(w, i, share)
        value += total(terms + log1p_positive(product))
        pull += total(slopes)
        weight += total(density)
    if gradient != 0:
        rate, pulled = task.scale * steep / f32(valid), f32(pull)
        at_kept, at_cut = f32(pull / weight), ZERO
        if law == DFTOPK:
            at_kept, at_cut = pulled * alpha / f32(kepts), pulled * (ONE - alpha) / f32(cuts)
        for i in range(0, size, WIDTH):
            score = load(v, i)
            moved = (load(s, i) - law_moves(law, score, load(w, i), kept, cut, at_kept, at_cut)) * rate
            store_where(gradient, i, where(score > -INFINITY, moved, ZERO), places(i32(i)) < i32(n))
    return value / valid


dftopk_kernel, logistic_kernel, laplace_kernel = (
    loss_kernel(law, membership_loss) for law in (DFTOPK, LOGISTIC, LAPLACE)
)
