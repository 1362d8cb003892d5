"""The kernel of the joint objective: the losses of all stages, the loss of survival, and all gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import (
    HALF,
    INFINITY,
    ONE,
    PRODUCT,
    TWO,
    ZERO,
    exp_negative,
    f32,
    i32,
    log1p_positive,
    log1p_unit,
    log_positive,
    magnitude,
)
from recsys_topk.ops.backends.compiled.build import inlined, native
from recsys_topk.ops.backends.compiled.clip import clip_stage, clip_survival
from recsys_topk.ops.backends.compiled.lanes import count, places, splat, total, where
from recsys_topk.ops.backends.compiled.laws import law_moves, law_terms, law_threshold
from recsys_topk.ops.backends.compiled.memory import load, read, store, store_where, write
from recsys_topk.ops.backends.compiled.selection import begin_list
from recsys_topk.ops.backends.compiled.stages import AT_CUT, AT_KEPT, COUNTED, CUT, KEPT, PULL, is_counted, stage_rows
from recsys_topk.ops.backends.compiled.tasks import clear, list_kernel
from recsys_topk.ops.backends.compiled.thresholds import distance
from recsys_topk.ops.backends.task import CLIP, DFTOPK, LAPLACE, LOGISTIC, STAGE_ROWS, WIDTH


@inlined
def stage_term(law: Any, task: Any, buffer: Any, q: Any, m: Any, facts: Any) -> Any:
    """Write the rows of a stage (see `stage_rows`); return the summed losses of all items and of the true items.

    Args:
        law: DFTOPK, LOGISTIC or LAPLACE.
        task: The task.
        buffer: The buffer of the thread.
        q: Weights of the items; 0 = 1 each.
        m: Index of the stage.
        facts: Those of `begin_list`.
    """
    size, steep, alpha, kept, cut = task.size, ONE / task.tau, task.alpha, facts.kept, facts.cut
    v, u, d, r, w, numbers = stage_rows(buffer, size, m)
    base, at, near = law_threshold(law, task, v, q, facts)
    unit = ONE if law == DFTOPK else f32(math.exp(-near))
    whole, own, pull, mass, kepts, cuts = 0.0, 0.0, 0.0, 0.0, i32(0), i32(0)
    for start in range(0, size, PRODUCT):
        trues, others, true_product, other_product = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        slopes, density = splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            score, sign = load(v, i), load(buffer, i)
            logit = distance(score, base, at) * steep
            factor, slope, rise, share = law_terms(law, logit, sign, near, unit)
            t, true = logit * sign, sign < ZERO
            item = where(t > ZERO, t, ZERO)
            if q != 0:
                weight = load(q, i)
                item = (item + log1p_unit(factor)) * weight
                slopes = slopes + slope * weight
                share = share * weight
            else:
                true_product = where(true, true_product * factor + (true_product + factor), true_product)
                other_product = where(true, other_product, other_product * factor + (other_product + factor))
                slopes = slopes + slope
            trues = trues + where(true, item, ZERO)
            others = others + where(true, ZERO, item)
            if law != DFTOPK:
                density = density + share
                store(w, i, share)
            elif q == 0:
                kepts += count(score == kept)
                cuts += count(score == cut)
            if law != LAPLACE:
                store(r, i, rise)
            store(u, i, logit)
            store(d, i, slope)
        loss = total(trues + log1p_positive(true_product))
        own += loss
        whole += loss + total(others + log1p_positive(other_product))
        pull += total(slopes)
        mass += total(density)
    write(numbers, KEPT, kept)
    write(numbers, CUT, cut)
    write(numbers, PULL, f32(pull))
    at_kept, at_cut = f32(1.0 / mass), ZERO
    if law == DFTOPK:
        at_kept = alpha / (facts.at_kept if q != 0 else f32(kepts))
        at_cut = (ONE - alpha) / (facts.at_cut if q != 0 else f32(cuts))
    write(numbers, AT_KEPT, at_kept)
    write(numbers, AT_CUT, at_cut)
    return whole, own


@inlined
def survival_loss(law: Any, task: Any, buffer: Any, weights: Any) -> Any:
    """Return the summed survival losses of the items that are not true; replace the rises by the slopes of that loss.

    With p_m the membership of stage m, p = prod_m p_m and q = 1 - p = sum_m (1 - p_m) prod_{l < m} p_l, the loss is
    -log q, with the derivative p / q d log p_m / du_m. The slopes are those of items of weight 1.
    """
    size, stages = task.size, task.stages
    s, losses = buffer, splat(ZERO)
    for i in range(0, size, WIDTH):
        low = splat(INFINITY)
        for m in range(stages):
            _, u, _, _, _, numbers = stage_rows(buffer, size, m)
            if is_counted(numbers):
                logit = load(u, i)
                low = where(logit < low, logit, low)
        true = load(s, i) < ZERO
        if law != LAPLACE and count(where(true, -ONE, low) > ZERO) == 0:
            # Every item that is not true is below the threshold of some stage. The slope of such an item is its
            # membership, and its rise one minus the membership.
            p, q = splat(ONE), splat(ZERO)
            for m in range(stages):
                _, _, d, r, _, numbers = stage_rows(buffer, size, m)
                if is_counted(numbers):
                    q = q + load(r, i) * p
                    p = p * load(d, i)
            odds = p / q
            loss = log1p_unit(odds)
        else:
            odds, loss = survivors(law, buffer, size, stages, i, where(low > ZERO, low, ZERO))
        loss = where(true, ZERO, loss)
        losses = losses + (loss * load(weights, i) if weights != 0 else loss)
        if task.gradient != 0:
            for m in range(stages):
                _, _, d, r, _, _ = stage_rows(buffer, size, m)
                store(r, i, where(true, load(d, i), odds * load(r, i)))
    return total(losses)


@inlined
def survivors(law: Any, buffer: Any, size: Any, stages: Any, i: Any, low: Any) -> Any:
    """Return p / q and -log q of 16 items, and write their rises, in units of exp(-low).

    `low` is the smallest logit of an item, or 0 if that is negative. In these units q is accurate for memberships near
    1.
    """
    unit = exp_negative(ZERO - low)
    p, q = splat(ONE), splat(ZERO)
    for m in range(stages):
        _, u, _, r, _, numbers = stage_rows(buffer, size, m)
        if is_counted(numbers):
            logit = load(u, i)
            up = logit > ZERO
            share = exp_negative(low - magnitude(logit))
            if law == LAPLACE:
                rest = ONE - share * unit * HALF
                q = q + where(up, share * HALF, rest) * p
                p = p * where(up, rest, share * HALF)
                rise = where(up, share / (TWO - share * unit), ONE)
            else:
                inverse = ONE / (share * unit + ONE)
                rise = where(up, share, ONE) * inverse
                q = q + rise * p
                p = p * where(up, ONE, share) * inverse
            store(r, i, rise)
    odds = p / q
    return odds, where(low > ZERO, low - log_positive(q), log1p_unit(where(low > ZERO, ZERO, odds)))


@inlined
def write_gradients(law: Any, task: Any, buffer: Any, q: Any, m: Any, rate: Any, own: Any, joint: Any) -> None:
    """Write the gradients of the loss of stage m and of survival: the slopes, corrected for the moving threshold."""
    n, size = task.items, task.size
    v, _, d, r, w, numbers = stage_rows(buffer, size, m)
    kept, cut, pull = read(numbers, KEPT, f32), read(numbers, CUT, f32), read(numbers, PULL, f32)
    at_kept, at_cut = read(numbers, AT_KEPT, f32), read(numbers, AT_CUT, f32)
    slopes = splat(ZERO)
    for i in range(0, size, WIDTH):
        slopes = slopes + (load(r, i) * load(q, i) if q != 0 else load(r, i))
    joint_pull = total(slopes)
    for i in range(0, size, WIDTH):
        score = load(v, i)
        moves = law_moves(law, score, load(w, i), kept, cut, at_kept, at_cut)
        inside = places(i32(i)) < i32(n)
        scale = where(score > -INFINITY, rate, ZERO)
        moves = where(score > -INFINITY, moves * rate, ZERO)
        if q != 0:
            weight = load(q, i)
            scale = scale * weight
            if law == DFTOPK:
                moves = moves * weight
        store_where(own, i, load(d, i) * scale - moves * pull, inside)
        store_where(joint, i, load(r, i) * scale - moves * joint_pull, inside)


def joint_kernel(law: int, weighted: bool) -> native:
    """Make the kernel of the joint objective for a law, for lists with or without weights.

    It writes the losses of each list and their gradients. The survival loss of a true item is the sum of its losses in
    the stages.
    """

    def joint_list(task: Any, b: Any, buffer: Any) -> Any:
        # Returns 1 (NaN if the square of a score overflows) and one loss.
        n, size, stages, lists = task.items, task.size, task.stages, task.lists
        share, joint = 0.0, 0.0
        y, weights = task.labels + 4 * b * n, task.weights + 4 * b * n
        mask = task.mask + b * n if task.mask != 0 else 0
        q = buffer + 4 * size * (1 + STAGE_ROWS * stages) if weighted else 0
        for m in range(stages):
            v, _, _, _, w, numbers = stage_rows(buffer, size, m)
            x = read(task.scores, m, np.int64) + 4 * b * n
            quota = read(task.quotas, m, np.int64) if task.quotas != 0 else -1
            k = np.float64(task.k)
            state, facts = begin_list(law, x, y, mask, weights, n, size, k, quota, task.above, v, buffer, w, q)
            if state < 0:
                return np.nan, 0.0
            write(numbers, COUNTED, ONE if state == 1 else ZERO)
            write(task.counted, m * lists + b, np.uint8(1 if state == 1 else 0))
            loss = 0.0
            if state == 1:
                share = 1.0 / facts.amount
                if law == CLIP:
                    loss, own = clip_stage(task, buffer, q, m, facts)
                else:
                    loss, own = stage_term(law, task, buffer, q, m, facts)
                joint += own
            write(task.losses, m * lists + b, f32(loss * share))
        if share > 0.0:
            joint += clip_survival(task, buffer, q) if law == CLIP else survival_loss(law, task, buffer, q)
        write(task.losses, stages * lists + b, f32(joint * share))
        write(task.counted, stages * lists + b, np.uint8(1 if share > 0.0 else 0))
        if task.gradient != 0:
            rate = f32(share) * task.scale / task.tau
            for m in range(stages):
                before = 4 * n * (m * lists + b)
                _, _, _, _, _, numbers = stage_rows(buffer, size, m)
                if is_counted(numbers):
                    write_gradients(law, task, buffer, q, m, rate, task.gradient + before, task.joint_gradient + before)
                else:
                    clear(task.gradient + before, n)
                    clear(task.joint_gradient + before, n)
        return 1.0, joint * share

    return list_kernel(inlined(joint_list))


_LAWS = (DFTOPK, LOGISTIC, LAPLACE, CLIP)
dftopk_joint, logistic_joint, laplace_joint, clip_joint = (joint_kernel(law, False) for law in _LAWS)
dftopk_joint_weighted, logistic_joint_weighted, laplace_joint_weighted, clip_joint_weighted = (
    joint_kernel(law, True) for law in _LAWS
)
