"""NeuralSort: rows of a relaxed permutation, the losses that use all of them, and Sinkhorn's scaling.

Row r of a list of m items is softmax_i(((m + 1 - 2 r) x_i - d_i) / tau), d_i = sum_j |x_i - x_j|.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import (
    INFINITY,
    ONE,
    ZERO,
    exp_negative,
    f32,
    i32,
    log_positive,
    magnitude,
)
from recsys_topk.ops.backends.compiled.build import compiled, inlined
from recsys_topk.ops.backends.compiled.lanes import count, greatest, places, splat, total, where
from recsys_topk.ops.backends.compiled.memory import load, read, store, write
from recsys_topk.ops.backends.task import WIDTH

MASS_ROWS, GRADIENT_ROWS, ARF_ROWS, NDCG_ROWS = 8, 13, 16, 12  # of the buffers; `neural_ndcg` needs further memory
LEAST = f32(1e-10)  # see `recsys_topk.ops.selection.sinkhorn_scaling`


@inlined
def relaxed_row(slope: Any, v: Any, d: Any, logits: Any, e: Any, size: Any) -> Any:
    """Write l = slope v - d to `logits`, then exp(l_i - max l) to `e`; return the maximum and the sum.

    Other code reads the logits from there: computed elsewhere, their rounding may differ.
    """
    tops = splat(-INFINITY)
    for i in range(0, size, WIDTH):
        logit = load(v, i) * slope - load(d, i)
        tops = where(logit > tops, logit, tops)
        store(logits, i, logit)
    top, sums = greatest(tops), splat(ZERO)
    for i in range(0, size, WIDTH):
        share = exp_negative(load(logits, i) - top)
        sums = sums + share
        store(e, i, share)
    return top, total(sums)


@inlined
def clear_row(address: Any, size: Any) -> None:
    """Write zeros."""
    for i in range(0, size, WIDTH):
        store(address, i, splat(ZERO))


@inlined
def minus(x: Any, large: Any, small: Any) -> Any:
    """Return x - large - small, in this order."""
    return (x - large) - small


@inlined
def exp_share(x: Any) -> Any:
    """Return exp(x) of the logarithm of a share; x > 0 is a rounding error."""
    return exp_negative(where(x > ZERO, ZERO, x))


@inlined
def copy_sorted(v: Any, d: Any, m: Any, size: Any, steep: Any, buffer: Any, row: Any) -> None:
    """Copy sorted scores, and their distances divided by tau, to the first two rows of a buffer."""
    for i in range(size):
        write(buffer, i, read(v, i, f32) if i < m else ZERO)
        write(buffer + row, i, read(d, i, f32) * steep if i < m else INFINITY)


@compiled
def neuralsort_lists(
    number: Any, begin: Any, end: Any, n: Any, v: Any, d: Any, ks: Any, counts: Any, steep: Any, normalised: Any,
    buffers: Any, size: Any, log_u: Any, log_d: Any,
) -> None:  # fmt: skip
    """Write the result of `recsys_topk.operators.neuralsort.neuralsort_masses`."""
    row = 4 * size
    buffer = buffers + number * MASS_ROWS * row
    x, far, e, logits = buffer, buffer + row, buffer + 2 * row, buffer + 7 * row
    for b in range(begin, end):
        m, k = read(counts, b, np.int64), read(ks, b, np.int64)
        padded = -(-m // WIDTH) * WIDTH
        copy_sorted(v + 4 * b * n, d + 4 * b * n, m, padded, steep, buffer, row)
        # Masses on the other side of k are summed relative to the nearest row on that side.
        for side in range(2):
            near, sums, edge = buffer + (3 + side) * row, buffer + (5 + side) * row, k - 1 + side
            slope = f32(m - 1 - 2 * edge) * steep
            relaxed_row(slope, x, far, logits, e, padded)
            own = read(logits, edge, f32)
            for i in range(0, padded, WIDTH):
                logit = minus(load(logits, i), own, ZERO)
                across = (places(i32(i)) >= i32(k)) if side == 0 else (places(i32(i)) < i32(k))
                store(near, i, where(across & (logit < ZERO), logit, ZERO))
                store(sums, i, splat(ZERO))
        for r in range(m if normalised else k):
            slope = f32(m - 1 - 2 * r) * steep
            top, whole = relaxed_row(slope, x, far, logits, e, padded)
            inverse, log_sum = ONE / whole, log_positive(whole)
            near, sums = (buffer + 3 * row, buffer + 5 * row) if r < k else (buffer + 4 * row, buffer + 6 * row)
            for i in range(0, padded, WIDTH):
                if (i + WIDTH <= k) if r < k else (i >= k):
                    store(sums, i, load(sums, i) + load(e, i) * inverse)
                else:
                    logit = minus(load(logits, i), top, load(near, i) + log_sum)
                    store(sums, i, load(sums, i) + exp_share(logit))
        for side in range(2):
            near, sums, out = buffer + (3 + side) * row, buffer + (5 + side) * row, log_u if side == 0 else log_d
            for i in range(0, padded, WIDTH):
                store(near, i, load(near, i) + log_positive(load(sums, i)))
            for i in range(n):
                known = i < m and (side == 0 or normalised)
                write(out, b * n + i, read(near, i, f32) if known else -INFINITY)


@compiled
def neuralsort_gradients(
    number: Any, begin: Any, end: Any, n: Any, v: Any, d: Any, ks: Any, counts: Any, log_u: Any, log_d: Any,
    grad_u: Any, grad_d: Any, steep: Any, normalised: Any, buffers: Any, size: Any, grad_v: Any, grad_far: Any,
) -> None:  # fmt: skip
    """Write the result of `recsys_topk.operators.neuralsort.neuralsort_gradient`; see `neuralsort_lists`."""
    row = 4 * size
    buffer = buffers + number * GRADIENT_ROWS * row
    x, far, e, shares = buffer, buffer + row, buffer + 2 * row, buffer + 3 * row
    gv, gd, logits = buffer + 4 * row, buffer + 5 * row, buffer + 12 * row
    for b in range(begin, end):
        m, k = read(counts, b, np.int64), read(ks, b, np.int64)
        padded = -(-m // WIDTH) * WIDTH
        copy_sorted(v + 4 * b * n, d + 4 * b * n, m, padded, steep, buffer, row)
        clear_row(gv, padded)
        clear_row(gd, padded)
        for side in range(2):
            logs, grads = (log_u, grad_u) if side == 0 else (log_d, grad_d)
            masses = buffer + (6 + 3 * side) * row
            for i in range(padded):
                write(masses, i, read(logs, b * n + i, f32) if i < m and (side == 0 or normalised) else ZERO)
                write(masses + row, i, read(grads, b * n + i, f32) if i < m else ZERO)
            # The gradient divided by the mass, which is at least 1 / n on its own side.
            for i in range(0, padded, WIDTH):
                mass = load(masses, i)
                divided = where(mass < ZERO, ONE / exp_share(mass), exp_share(splat(ZERO) - mass))
                store(masses + 2 * row, i, load(masses + row, i) * divided)
        for r in range(m if normalised else k):
            slope = f32(m - 1 - 2 * r) * steep
            top, whole = relaxed_row(slope, x, far, logits, e, padded)
            inverse, log_sum = ONE / whole, log_positive(whole)
            masses = buffer + (6 if r < k else 9) * row
            dots = splat(ZERO)
            for i in range(0, padded, WIDTH):
                p = load(e, i) * inverse
                if (i + WIDTH <= k) if r < k else (i >= k):
                    share = p * load(masses + 2 * row, i)
                else:
                    logit = minus(load(logits, i), top, load(masses, i) + log_sum)
                    share = exp_share(logit) * load(masses + row, i)
                dots = dots + share
                store(e, i, p)
                store(shares, i, share)
            dot = total(dots)
            for i in range(0, padded, WIDTH):
                into = load(shares, i) - load(e, i) * dot
                store(gd, i, load(gd, i) - into)
                store(gv, i, load(gv, i) + into * slope)
        for i in range(n):
            write(grad_v, b * n + i, read(gv, i, f32) if i < m else ZERO)
            write(grad_far, b * n + i, read(gd, i, f32) * steep if i < m else ZERO)


@inlined
def copy_valid(x: Any, mask: Any, n: Any, items: Any, v: Any, size: Any) -> Any:
    """Copy the valid scores of a list minus their mean to `v`, padded with 0; return their number.

    The indices of the valid items go to `items`, int32.
    """
    m, whole = 0, 0.0
    for i in range(n):
        if mask == 0 or read(mask, i, np.uint8) != 0:
            write(items, m, i32(i))
            write(v, m, read(x, i, f32))
            whole += read(x, i, f32)
            m += 1
    mean = f32(whole / max(m, 1))
    for i in range(size):
        write(v, i, read(v, i, f32) - mean if i < m else ZERO)
    return m


@inlined
def all_distances(v: Any, d: Any, m: Any, size: Any, steep: Any) -> None:
    """Write sum_j |v_i - v_j| / tau to `d`; inf beyond the m items."""
    for i in range(size):
        own, sums = read(v, i, f32), splat(ZERO)
        for j in range(0, size, WIDTH):
            sums = sums + where(places(i32(j)) < i32(m), magnitude(load(v, j) - own), ZERO)
        write(d, i, total(sums) * steep if i < m else INFINITY)


@inlined
def through_distances(v: Any, gv: Any, gd: Any, m: Any, size: Any) -> None:
    """Add to gv_i what comes through the distances: sum_j (gd_i + gd_j) sign(v_i - v_j)."""
    for i in range(m):
        own, pull, sums = read(v, i, f32), read(gd, i, f32), splat(ZERO)
        for j in range(0, size, WIDTH):
            both = load(gd, j) + pull
            gap = load(v, j) - own
            signed = where(gap < ZERO, both, ZERO) - where(gap > ZERO, both, ZERO)
            sums = sums + where(places(i32(j)) < i32(m), signed, ZERO)
        write(gv, i, read(gv, i, f32) + total(sums))


@inlined
def write_items(values: Any, items: Any, m: Any, out: Any, n: Any) -> None:
    """Write the values of m items to their places in a list of n; 0 elsewhere."""
    for i in range(n):
        write(out, i, ZERO)
    for i in range(m):
        write(out, np.int64(read(items, i, i32)), read(values, i, f32))


@compiled
def arf_lists(
    number: Any, begin: Any, end: Any, n: Any, x: Any, labels: Any, mask: Any, targets: Any, quotas: Any, steep: Any,
    eps: Any, both: Any, buffers: Any, size: Any, losses: Any, gradient: Any, lists: Any,
) -> None:  # fmt: skip
    """Write L_relax and L_global of ARF and their gradients; see `recsys_topk.ops.losses.arf_terms`.

    Further arguments:
        losses: (2, B), written.
        gradient: (2, B, N), written; 0 = no gradient.
        lists: B.
    """
    row = 4 * size
    buffer = buffers + number * ARF_ROWS * row
    v, far, e, item = buffer, buffer + row, buffer + 2 * row, buffer + 3 * row
    ahead, last, weight, true = buffer + 4 * row, buffer + 5 * row, buffer + 6 * row, buffer + 7 * row
    up, down, y = buffer + 8 * row, buffer + 9 * row, buffer + 10 * row
    gv, gd = buffer + 11 * row, buffer + 12 * row  # of L_relax; the next two rows are those of L_global
    for b in range(begin, end):
        valid = mask + b * n if mask != 0 else 0
        m, quota = copy_valid(x + 4 * b * n, valid, n, item, v, size), read(quotas, b, np.int64)
        padded = -(-m // WIDTH) * WIDTH
        all_distances(v, far, m, padded, steep)
        for i in range(padded):
            at = b * n + np.int64(read(item, i, i32)) if i < m else b * n
            write(y, i, read(labels, at, f32) if i < m else -INFINITY)
            write(true, i, read(targets, at, f32) if i < m else ZERO)
        # Tied labels share the rows ahead + 1 .. last evenly.
        for i in range(padded):
            own, larger, equal = read(y, i, f32), i32(0), i32(0)
            for j in range(0, padded, WIDTH):
                larger += count(load(y, j) > own)
                equal += count(load(y, j) == own)
            write(ahead, i, f32(larger))
            write(last, i, f32(larger + equal) if i < m else -ONE)
            write(weight, i, ONE / f32(equal))
        for i in range(0, padded, WIDTH):
            for at in range(8, 15):
                if at != 10:
                    store(buffer + at * row, i, splat(ZERO))
        order = 0.0
        for r in range(m):
            _, whole = relaxed_row(f32(m - 1 - 2 * r) * steep, v, far, e, e, padded)
            inverse, place, sums = ONE / whole, f32(r), splat(ZERO)
            side = up if r < quota else down
            for i in range(0, padded, WIDTH):
                p = load(e, i) * inverse
                store(side, i, load(side, i) + p)
                inside = (load(ahead, i) <= place) & (load(last, i) > place)
                if count(inside) > 0:
                    sums = sums + where(inside, load(weight, i) * log_positive(p + eps), ZERO)
            order -= total(sums)
        items, relax = f32(m), 0.0
        for i in range(m):  # the derivatives of L_relax replace the masses
            target, one, other = read(true, i, f32), read(up, i, f32), read(down, i, f32)
            if both:
                all_rows = one + other + eps
                relax -= target * log_positive(one / all_rows + eps) + (ONE - target) * log_positive(
                    other / all_rows + eps
                )
                write(up, i, -target / (one + eps * all_rows) / items)
                write(down, i, (target - ONE) / (other + eps * all_rows) / items)
            else:
                relax -= target * log_positive(one / f32(quota) + eps)
                write(up, i, -target / (one + eps * f32(quota)) / items)
                write(down, i, ZERO)
        write(losses, b, f32(relax / m))
        write(losses, lists + b, f32(order / (m * m)))
        if gradient == 0:
            continue
        scale = ONE / (items * items)
        for r in range(m):
            slope, place = f32(m - 1 - 2 * r) * steep, f32(r)
            _, whole = relaxed_row(slope, v, far, e, e, padded)
            inverse, side = ONE / whole, up if r < quota else down
            dots, order_dots = splat(ZERO), splat(ZERO)
            for i in range(0, padded, WIDTH):
                p = load(e, i) * inverse
                store(e, i, p)
                inside = (load(ahead, i) <= place) & (load(last, i) > place)
                dots = dots + load(side, i) * p
                order_dots = order_dots - where(inside, load(weight, i) * p / (p + eps), ZERO)
            dot, order_dot = total(dots), total(order_dots)
            for i in range(0, padded, WIDTH):
                p = load(e, i)
                inside = (load(ahead, i) <= place) & (load(last, i) > place)
                into = p * (load(side, i) - dot)
                store(gv, i, load(gv, i) + into * slope)
                store(gd, i, load(gd, i) - into)
                into = (splat(ZERO) - where(inside, load(weight, i) * p / (p + eps), ZERO) - p * order_dot) * scale
                store(gv + 2 * row, i, load(gv + 2 * row, i) + into * slope)
                store(gd + 2 * row, i, load(gd + 2 * row, i) - into)
        for term in range(2):
            grads, pulls = gv + 2 * term * row, gd + 2 * term * row
            for i in range(0, padded, WIDTH):
                store(pulls, i, load(pulls, i) * steep)
            through_distances(v, grads, pulls, m, padded)
            write_items(grads, item, m, gradient + 4 * (term * lists + b) * n, n)


@inlined
def inverse_of(sums: Any) -> Any:
    """Return 1 / max(sum, LEAST) of a number or of 16."""
    return ONE / where(sums < LEAST, LEAST, sums)


@inlined
def squared(inverse: Any) -> Any:
    """Return 1 / s^2 for 1 / s of `inverse_of`; 0 where s is at its lower bound."""
    return where(inverse * LEAST < ONE, inverse * inverse, ZERO)


@inlined
def dot_row(matrix: Any, vector: Any, size: Any) -> Any:
    """Return the sum of the products of two rows, whose size is a multiple of 2 WIDTH."""
    one, other = splat(ZERO), splat(ZERO)
    for i in range(0, size, 2 * WIDTH):
        one = one + load(matrix, i) * load(vector, i)
        other = other + load(matrix, i + WIDTH) * load(vector, i + WIDTH)
    return total(one + other)


@inlined
def add_row(matrix: Any, factor: Any, sums: Any, size: Any) -> None:
    """Add a row times a number to `sums`."""
    for i in range(0, size, WIDTH):
        store(sums, i, load(sums, i) + load(matrix, i) * factor)


@compiled
def neural_ndcg_lists(
    number: Any, begin: Any, end: Any, n: Any, x: Any, mask: Any, gains: Any, discounts: Any, steep: Any, rounds: Any,
    tolerance: Any, buffers: Any, size: Any, losses: Any, gradient: Any,
) -> None:  # fmt: skip
    """Write NeuralNDCG and its gradient; see `recsys_topk.ops.losses.neural_ndcg`.

    With M the relaxed permutation, round t is v_t = 1 / M' u_{t-1}, u_t = 1 / M v_t. In the reversed rounds, a_t and
    b_t are the gradients of the sums M v_t and M' u_{t-1}. The gradient of M is the sum of a_t v_t' + u_{t-1} b_t'.

    Further arguments:
        tolerance: The rounds end if all column sums differ from 1 by less.
        buffers: (parts, NDCG_ROWS + size + 4 rounds + 2, size), overwritten.
        size: N rounded up to a multiple of 2 WIDTH.
        losses: (B,), written.
        gradient: (B, N), written; 0 = no gradient.
    """
    row = 4 * size
    buffer = buffers + number * (NDCG_ROWS + size + 4 * rounds + 2) * row
    v, far, item = buffer, buffer + row, buffer + 2 * row
    gain, sums, e = buffer + 3 * row, buffer + 4 * row, buffer + 5 * row
    gv, gd, running, weighted = buffer + 6 * row, buffer + 7 * row, buffer + 8 * row, buffer + 9 * row
    matrix = buffer + NDCG_ROWS * row
    us = matrix + size * row  # us[0] is u before the first round
    vs = us + (rounds + 1) * row
    ups, downs = vs + rounds * row, vs + 2 * rounds * row  # a and b
    for b in range(begin, end):
        valid = mask + b * n if mask != 0 else 0
        m = copy_valid(x + 4 * b * n, valid, n, item, v, size)
        all_distances(v, far, m, size, steep)
        for i in range(size):
            write(gain, i, read(gains, b * n + np.int64(read(item, i, i32)), f32) if i < m else ZERO)
            write(us, i, ONE if i < m else ZERO)
        clear_row(sums, size)
        for r in range(m):
            _, whole = relaxed_row(f32(m - 1 - 2 * r) * steep, v, far, e, e, size)
            inverse = ONE / whole
            for i in range(0, size, WIDTH):
                p = where(places(i32(i)) < i32(m), load(e, i) * inverse, ZERO)
                store(matrix + r * row, i, p)
                store(sums, i, load(sums, i) + p)
        steps = 0
        for step in range(rounds):
            factors, before = vs + step * row, us + (step + 1) * row
            for i in range(0, size, WIDTH):
                store(factors, i, where(places(i32(i)) < i32(m), inverse_of(load(sums, i)), ZERO))
            clear_row(sums, size)
            for r in range(m):
                u = inverse_of(dot_row(matrix + r * row, factors, size))
                write(before, r, u)
                add_row(matrix + r * row, u, sums, size)
            steps += 1
            off = splat(ZERO)
            for i in range(0, size, WIDTH):
                gap = where(places(i32(i)) < i32(m), magnitude(load(factors, i) * load(sums, i) - ONE), ZERO)
                off = where(gap > off, gap, off)
            if greatest(off) < tolerance:
                break
        last_u, last_v = us + steps * row, vs + (steps - 1) * row
        for i in range(0, size, WIDTH):
            store(weighted, i, load(last_v, i) * load(gain, i))
        value = 1.0
        clear_row(sums, size)
        for r in range(m):
            reached, d = dot_row(matrix + r * row, weighted, size), read(discounts, b * n + r, f32)
            u = read(last_u, r, f32)
            value -= u * d * reached
            write(running, r, -d * reached)
            add_row(matrix + r * row, u * d, sums, size)
        write(losses, b, f32(value) if value > 0.0 else ZERO)
        if gradient == 0:
            continue
        clear_row(gv, size)
        clear_row(gd, size)
        clear_row(e, size)  # the gradient of the last v
        for i in range(0, size, WIDTH):
            store(e, i, splat(ZERO) - load(gain, i) * load(sums, i))
        for back in range(steps if value >= 0.0 else 0):
            step = steps - 1 - back
            clear_row(sums, size)
            for r in range(m):
                if back > 0:
                    write(running, r, dot_row(matrix + r * row, downs + (step + 1) * row, size))
                a = -read(running, r, f32) * squared(read(us + (step + 1) * row, r, f32))
                write(ups + step * row, r, a)
                add_row(matrix + r * row, a, sums, size)
            for i in range(0, size, WIDTH):
                given = load(sums, i) + load(e, i) if back == 0 else load(sums, i)
                store(downs + step * row, i, splat(ZERO) - given * squared(load(vs + step * row, i)))
        for r in range(m if value >= 0.0 else 0):
            slope, direct = f32(m - 1 - 2 * r) * steep, -read(last_u, r, f32) * read(discounts, b * n + r, f32)
            dots = splat(ZERO)
            for i in range(0, size, 2 * WIDTH):
                one, other = load(weighted, i) * direct, load(weighted, i + WIDTH) * direct
                third, fourth = splat(ZERO), splat(ZERO)
                for step in range(steps):
                    a, u = read(ups + step * row, r, f32), read(us + step * row, r, f32)
                    one = one + load(vs + step * row, i) * a
                    other = other + load(vs + step * row, i + WIDTH) * a
                    third = third + load(downs + step * row, i) * u
                    fourth = fourth + load(downs + step * row, i + WIDTH) * u
                one = load(matrix + r * row, i) * (one + third)
                other = load(matrix + r * row, i + WIDTH) * (other + fourth)
                store(e, i, one)
                store(e, i + WIDTH, other)
                dots = dots + (one + other)
            dot = total(dots)
            for i in range(0, size, WIDTH):
                into = load(e, i) - load(matrix + r * row, i) * dot
                store(gv, i, load(gv, i) + into * slope)
                store(gd, i, load(gd, i) - into * steep)
        through_distances(v, gv, gd, m, size)
        write_items(gv, item, m, gradient + 4 * b * n, n)
