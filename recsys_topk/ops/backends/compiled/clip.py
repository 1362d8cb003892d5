"""The kernels of the clipped membership p = clip((x - b) / tau, 0, 1), which sums to k."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import HALF, INFINITY, ONE, ZERO, f32, i32, log1p_positive
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import places, splat, total, where
from recsys_topk.ops.backends.compiled.losses import loss_kernel, loss_rows
from recsys_topk.ops.backends.compiled.memory import load, store, store_where, write
from recsys_topk.ops.backends.compiled.stages import AT_KEPT, PULL, is_counted, stage_rows
from recsys_topk.ops.backends.compiled.thresholds import clip_threshold
from recsys_topk.ops.backends.task import CLIP, FENCHEL_YOUNG, WIDTH

LEAST, MOST = f32(1e-6), f32(1.0 - 1e-6)  # as in recsys_topk.ops.losses.topk_loss
PRODUCT = 6 * WIDTH  # items whose factors of at most 1e6 are multiplied in float32


@inlined
def complement(p: Any) -> Any:
    """Return 1 - p of a clamped membership; 1e-6 for MOST, which is rounded."""
    return where(p < MOST, ONE - p, LEAST)


@inlined
def clip_terms(
    v: Any, q: Any, s: Any, size: Any, cut: Any, at: Any, steep: Any, d: Any, w: Any, memberships: Any, rises: Any
) -> Any:
    """Write the slopes of the items, and return the summed losses of all and of the true items, and the summed slopes.

    The loss of an item is -log p or -log(1 - p), with p clamped to [1e-6, 1 - 1e-6]; clamped items have no slope. With
    c the probability inside the logarithm, the loss is log(1 + e), e = (1 - c) / c. The sum of log(1 + e_i) is
    log(1 + f), with 1 + f the product of the 1 + e_i.

    Args:
        v: Scores, -inf where masked.
        q: Weights; 0 = 1 each.
        s: -1 for the true items and 1 for the others.
        size: Length of the arrays.
        cut: x_[k+1].
        at: The threshold above `cut`, in units of tau.
        steep: 1 / tau.
        d: Receives the derivatives of the losses with respect to (x - b) / tau; may be s.
        w: Receives the weight of the items with 0 < p < 1, on which the threshold depends, and 0 for the others.
        memberships: Receives the clamped memberships, 0 where masked; 0 = not wanted.
        rises: Receives the derivatives of log p; 0 = not wanted.
    """
    whole, own, slopes = 0.0, 0.0, splat(ZERO)
    for start in range(0, size, PRODUCT):
        trues, others = splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            score, sign = load(v, i), load(s, i)
            z = (score - cut) * steep - at
            p = where(z < LEAST, LEAST, z)
            p = where(p > MOST, MOST, p)
            p = where(score > -INFINITY, p, ZERO)
            rest = complement(p)
            true, free = sign < ZERO, (z >= LEAST) & (z <= MOST)
            inverse = ONE / where(true, p, rest)
            slope = where(free, sign * inverse, ZERO)
            e = where(true, rest, p) * inverse
            weight = splat(ONE)
            if q != 0:
                weight = load(q, i)
                item = log1p_positive(e) * weight
                trues = trues + where(true, item, ZERO)
                others = others + where(true, ZERO, item)
            else:
                trues = where(true, trues * e + (trues + e), trues)
                others = where(true, others, others * e + (others + e))
            slopes = slopes + slope * weight
            store(d, i, slope)
            store(w, i, where((z > ZERO) & (z < ONE), weight, ZERO))
            if memberships != 0:
                store(memberships, i, p)
                store(rises, i, where(free, ONE / p, ZERO))
        if q == 0:
            trues, others = log1p_positive(trues), log1p_positive(others)
        loss = total(trues)
        own += loss
        whole += loss + total(others)
    return whole, own, total(slopes)


@inlined
def clip(law: Any, task: Any, buffer: Any, q: Any, gradient: Any, facts: Any) -> Any:
    """Return the loss of a list under the CLIP or FENCHEL_YOUNG law and write its gradient (see `loss_kernel`)."""
    n, size, tau, cut, amount = task.items, task.size, task.tau, facts.cut, f32(facts.amount)
    v, s, w, _ = loss_rows(buffer, size)
    steep = ONE / tau
    at, inside = clip_threshold(v, q, size, facts, steep)
    if law == FENCHEL_YOUNG:
        hinges, rate = splat(ZERO), task.scale / amount
        for i in range(0, size, WIDTH):
            z = (load(v, i) - cut) * steep - at
            true = load(s, i) < ZERO
            wrong = where(true, ONE - z, z)
            wrong = where(wrong < ZERO, ZERO, wrong)
            hinge = where(wrong >= ONE, wrong - HALF, wrong * wrong * HALF)
            p = where(z < ZERO, ZERO, z)
            slope = (where(p > ONE, ONE, p) - where(true, ONE, ZERO)) * rate
            if q != 0:
                hinge, slope = hinge * load(q, i), slope * load(q, i)
            hinges = hinges + hinge
            if gradient != 0:
                store_where(gradient, i, slope, places(i32(i)) < i32(n))
        return np.float64(total(hinges) * tau) / facts.amount
    value, _, pull = clip_terms(v, q, s, size, cut, at, steep, s, w, 0, 0)
    if gradient != 0:
        rate, average = task.scale * steep / amount, pull / (inside if inside > ZERO else ONE)
        for i in range(0, size, WIDTH):
            slope = load(s, i) * load(q, i) if q != 0 else load(s, i)
            store_where(gradient, i, (slope - load(w, i) * average) * rate, places(i32(i)) < i32(n))
    return value / facts.amount


clip_kernel, fenchel_young_kernel, clip_weighted, fenchel_young_weighted = (
    loss_kernel(law, clip, weighted) for weighted in (False, True) for law in (CLIP, FENCHEL_YOUNG)
)


@inlined
def clip_stage(task: Any, buffer: Any, q: Any, m: Any, facts: Any) -> Any:
    """The `stage_term` of the joint objective for the CLIP law; memberships take the place of logits."""
    size, steep = task.size, ONE / task.tau
    v, u, d, r, w, numbers = stage_rows(buffer, size, m)
    at, inside = clip_threshold(v, q, size, facts, steep)
    whole, own, pull = clip_terms(v, q, buffer, size, facts.cut, at, steep, d, w, u, r)
    write(numbers, PULL, pull)
    write(numbers, AT_KEPT, ONE / (inside if inside > ZERO else ONE))
    return whole, own


@inlined
def clip_survival(task: Any, buffer: Any, q: Any) -> Any:
    """The `survival_loss` of the joint objective for the CLIP law."""
    size, stages = task.size, task.stages
    s, value = buffer, 0.0
    for start in range(0, size, PRODUCT):
        product = splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            p, rest = splat(ONE), splat(ZERO)
            for m in range(stages):
                _, u, _, _, _, numbers = stage_rows(buffer, size, m)
                if is_counted(numbers):
                    membership = load(u, i)
                    rest = rest + complement(membership) * p
                    p = p * membership
            true, odds = load(s, i) < ZERO, p / rest
            e = where(true, ZERO, odds)
            product = product + log1p_positive(e) * load(q, i) if q != 0 else product * e + (product + e)
            if task.gradient != 0:
                for m in range(stages):
                    _, _, d, r, _, _ = stage_rows(buffer, size, m)
                    store(r, i, where(true, load(d, i), odds * load(r, i)))
        value += total(product if q != 0 else log1p_positive(product))
    return value
