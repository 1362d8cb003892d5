"""The loops of the losses whose memberships sum to k: logistic, Laplace and clipped ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recsys_topk.ops.compiled.arithmetic import (
    FENCHEL_YOUNG,
    HALF,
    INFINITY,
    LOGISTIC,
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
from recsys_topk.ops.compiled.build import inlined, native
from recsys_topk.ops.compiled.lanes import places, splat, total, where
from recsys_topk.ops.compiled.memory import load, read, store, store_where, write
from recsys_topk.ops.compiled.selection import begin_list
from recsys_topk.ops.compiled.tasks import buffer_of, end_list, rows_of, take, task_at, wanted_of
from recsys_topk.ops.compiled.thresholds import clip_threshold, distance, threshold
from recsys_topk.ops.task import WIDTH

LEAST, MOST = f32(1e-6), f32(1.0 - 1e-6)  # as in recsys_topk.ops.topk_loss
PER_LOG = 32  # probabilities of 1e-6 or more whose product is a float64


@inlined
def threshold_list(task: Any, b: Any, buffer: Any) -> Any:
    """Do what `dftopk_list` does for the LOGISTIC and LAPLACE laws.

    The loss of an item is softplus(t), or -log F(-t) for the Laplace law. The threshold b moves with an item by its
    share of the density, w_i / sum_j w_j. Distances are taken from that of the nearest item, so that the shares exist
    however far all items are.
    """
    n, size, law, tau = task.items, task.size, task.law, task.tau
    normal, v, s, w = buffer, buffer + 64, buffer + 64 + 4 * size, buffer + 64 + 8 * size
    x, y, mask, gradient = rows_of(task, b)
    state, rank, valid, kept, cut, mean, variance = begin_list(
        law, x, y, mask, n, size, wanted_of(task, b), -1, task.above, v, s, w, normal
    )
    if state != 1:
        return state, 0.0
    steep, z = ONE / tau, read(normal, 2, f32)
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
    return state, value / valid


@inlined
def clamped_logs(p: Any, size: Any) -> Any:
    """Return sum_i log(p_i) of probabilities of 1e-6 or more."""
    value = 0.0
    for start in range(0, size, PER_LOG):
        product = 1.0
        for i in range(start, min(start + PER_LOG, size)):
            product *= np.float64(read(p, i, f32))
        value += math.log(product)
    return value


@inlined
def clip_list(task: Any, b: Any, buffer: Any) -> Any:
    """Do what `dftopk_list` does for the CLIP and FENCHEL_YOUNG laws: p = clip((x - b) / tau, 0, 1), summing to k.

    Under CLIP the loss is the cross-entropy of p clamped to [1e-6, 1 - 1e-6], with no gradient outside.
    """
    n, size, law, tau = task.items, task.size, task.law, task.tau
    normal, v, s, w = buffer, buffer + 64, buffer + 64 + 4 * size, buffer + 64 + 8 * size
    x, y, mask, gradient = rows_of(task, b)
    state, rank, valid, kept, cut, _, _ = begin_list(
        law, x, y, mask, n, size, wanted_of(task, b), -1, task.above, v, s, w, normal
    )
    if state != 1:
        return state, 0.0
    steep = ONE / tau
    at, inside = clip_threshold(v, size, rank, cut, (kept - cut) * steep, steep)
    if law == FENCHEL_YOUNG:
        hinges, rate = splat(ZERO), task.scale / f32(valid)
        for i in range(0, size, WIDTH):
            z = (load(v, i) - cut) * steep - at
            true = load(s, i) < ZERO
            wrong = where(true, ONE - z, z)
            wrong = where(wrong < ZERO, ZERO, wrong)
            hinges = hinges + where(wrong >= ONE, wrong - HALF, wrong * wrong * HALF)
            if gradient != 0:
                p = where(z < ZERO, ZERO, z)
                p = where(p > ONE, ONE, p)
                store_where(gradient, i, (p - where(true, ONE, ZERO)) * rate, places(i32(i)) < i32(n))
        return state, np.float64(total(hinges) * tau) / valid
    pulls = splat(ZERO)
    for i in range(0, size, WIDTH):
        sign = load(s, i)
        z = (load(v, i) - cut) * steep - at
        fractional = (z > ZERO) & (z < ONE)
        p = where(z < ZERO, ZERO, z)
        p = where(p > ONE, ONE, p)
        chosen = where(sign < ZERO, p, ONE - p)
        clamped = where(chosen < LEAST, LEAST, chosen)
        clamped = where(clamped > MOST, MOST, clamped)
        m = where((chosen == clamped) & fractional, sign / clamped, ZERO)
        pulls = pulls + m
        store(s, i, m)
        store(w, i, where(load(v, i) > -INFINITY, clamped, ONE))
        store(v, i, where(fractional, ONE, ZERO))
    if gradient != 0:
        rate, average = task.scale * steep / f32(valid), total(pulls) / f32(max(inside, i32(1)))
        for i in range(0, size, WIDTH):
            store_where(gradient, i, (load(s, i) - load(v, i) * average) * rate, places(i32(i)) < i32(n))
    return state, -clamped_logs(w, size) / valid


@native
def threshold_lists(address: Any) -> None:
    """Do the lists of a task, as one of its threads."""
    task, buffer = task_at(address), buffer_of(address)
    while True:
        part, first, last = take(address)
        if part < 0:
            break
        counted, whole = 0.0, 0.0
        for b in range(first, last):
            state, loss = threshold_list(task, b, buffer)
            counted += end_list(task, b, state, loss)
            whole += loss
        write(task.results, 2 * part, counted)
        write(task.results, 2 * part + 1, whole)


@native
def clip_lists(address: Any) -> None:
    """Do the lists of a task, as one of its threads."""
    task, buffer = task_at(address), buffer_of(address)
    while True:
        part, first, last = take(address)
        if part < 0:
            break
        counted, whole = 0.0, 0.0
        for b in range(first, last):
            state, loss = clip_list(task, b, buffer)
            counted += end_list(task, b, state, loss)
            whole += loss
        write(task.results, 2 * part, counted)
        write(task.results, 2 * part + 1, whole)
