"""Sums over the pairs of items of a list."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import (
    HALF,
    INFINITY,
    LOG_2,
    ONE,
    PRODUCT,
    TWO,
    ZERO,
    below_zero,
    exp_negative,
    f32,
    i32,
    log1p_positive,
    log1p_unit,
    log_positive,
    magnitude,
)  # fmt: skip
from recsys_topk.ops.backends.compiled.build import compiled, inlined
from recsys_topk.ops.backends.compiled.lanes import bits_of, count, greatest, least, places, splat, total, where
from recsys_topk.ops.backends.compiled.memory import gather, load, read, store, write
from recsys_topk.ops.backends.task import WIDTH

PAIR_ONES, PAIR_DIFFERENCES, PAIR_ROWS = 0, 1, 2  # positions in `recsys_topk.ops.losses.pair_sums.KINDS`
FLAT, SWAP, NEAR, BOTH = 0, 1, 2, 3  # which parts the second factor of a weight has: none, discounts, delta, both

# Rows of the buffer of `pair_lists`. PLACE, COUNT and TWICE hold int32, float32 and int32. With weights COUNT is the
# weight of an item and TWICE its rank, in float32.
X, UP, DOWN, FIRST, SECOND, DISCOUNT, DEEP, GRADIENT, PLACE, COUNT, TWICE = range(11)
ROWS = 11

MERGED = 0.8  # all items of equal rank are merged if fewer than this share of the items is left
NARROW = f32(32.0)  # exp(x_i) is stored per item if sigma times the range of the scores is at most this


@inlined
def exponentials(x: Any, up: Any, down: Any, size: Any, scale: Any) -> Any:
    """Write exp(s (x_i - c)) and its inverse, c the middle of the scores; return whether their range permits it.

    Args:
        x: Address of the scores.
        up: Address of the exponentials.
        down: Address of their inverses.
        size: Number of scores, a multiple of WIDTH.
        scale: s.
    """
    lows, highs = splat(INFINITY), splat(-INFINITY)
    for i in range(0, size, WIDTH):
        value = load(x, i)
        lows, highs = where(value < lows, value, lows), where(value > highs, value, highs)
    low, high = least(lows), greatest(highs)
    if not (high - low) * scale <= NARROW:
        return False
    middle = low + (high - low) / TWO
    for i in range(0, size, WIDTH):
        v = (load(x, i) - middle) * scale
        e = exp_negative(below_zero(v))
        inverse = ONE / e
        store(up, i, where(v > ZERO, inverse, e))
        store(down, i, where(v > ZERO, e, inverse))
    return True


@inlined
def gain(kind: Any, gap: Any, first: Any) -> Any:
    """Return g_ij of 16 pairs, from first_i - second_j and first_i."""
    if kind == PAIR_DIFFERENCES:
        return where(gap > ZERO, gap, ZERO)
    return where(gap > (-INFINITY if kind == PAIR_ROWS else ZERO), splat(first if kind == PAIR_ROWS else ONE), ZERO)


@inlined
def delta(distance: Any) -> Any:
    """Return D(d) - D(d + 1) of the distances of 16 pairs of ranks, without cancellation."""
    after = where(distance > HALF, distance, HALF) + ONE
    near, step = log_positive(after), log1p_unit(ONE / after)
    return step * LOG_2 / (near * (near + step))


@inlined
def row_sums(
    kind: Any, form: Any, weighted: Any, signed: Any, narrow: Any, tied: Any, a: Any, begin: Any, size: Any, row: Any,
    buffer: Any, n: Any, table: Any, k: Any, mu: Any, sigma: Any,
) -> Any:  # fmt: skip
    """Add the pairs of item a with the items from `begin` on to the gradients in the buffer; return their sum.

    With W_b the weight, positive if a is the better item and negative if b is, u = x_a - x_b and f = exp(-sigma |u|),
    the term of a pair is |W| log(1 + f) + sigma max(-W u, 0) and its derivative with respect to -sigma u is W / (1 + f)
    times f if W u > 0, else 1.

    Args:
        kind: PAIR_ONES, PAIR_DIFFERENCES or PAIR_ROWS.
        form: FLAT, SWAP, NEAR or BOTH.
        weighted: Whether the items have weights; they are then `tied`.
        signed: Whether to add the pairs with the items b > a, of which either may be better. Otherwise a is better.
        narrow: Whether UP and DOWN hold `exponentials`.
        tied: Whether the items b may stand for several. Otherwise their positions are their ranks, from 1.
        a: Position of the item.
        begin: First position, a multiple of WIDTH.
        size: One past the last position, a multiple of WIDTH.
        row: Bytes of a row of the buffer.
        buffer: Address of the buffer.
        n: Number of items for which the tables were made.
        table: Address of the tables of `recsys_topk.ops.losses.pair_sums.delta_tables`.
        k: k of delta.
        mu: Weight of delta.
        sigma: Steepness.
    """
    x, up, down, g = buffer, buffer + UP * row, buffer + DOWN * row, buffer + GRADIENT * row
    first, second, counts = buffer + FIRST * row, buffer + SECOND * row, buffer + COUNT * row
    discounts, twice, deep = buffer + DISCOUNT * row, buffer + TWICE * row, buffer + DEEP * row
    own, own_first, own_second = read(x, a, f32), read(first, a, f32), read(second, a, f32)
    own_up, own_down, own_count = read(up, a, f32), read(down, a, f32), read(counts, a, f32)
    own_discount, own_deep, own_twice = read(discounts, a, f32), read(deep, a, f32), read(twice, a, i32)
    own_rank = read(twice, a, f32)
    width = 2 * n + 2 * WIDTH
    line, halves = table + 4 * (n + WIDTH - 1 - a), table + 4 * width
    whole, pull = ZERO, ZERO
    for start in range(begin, size, PRODUCT):
        terms, pulls, product, far = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(start, min(start + PRODUCT, size), WIDTH):
            w = gain(kind, own_first - load(second, i), own_first)
            if signed:
                w = w - gain(kind, load(first, i) - own_second, own_first)
                w = where(places(i32(i)) > i32(a), w, ZERO)
            if form >= NEAR:
                below = bits_of(load(twice, i)) - own_twice  # ranks are positive: their bits have their order
                if weighted:
                    part = delta(magnitude(load(twice, i) - own_rank)) * mu
                elif tied:
                    part = gather(halves, where(below < i32(0), splat(i32(0)) - below, below))
                else:
                    part = load(line, i)
                if k < INFINITY:
                    part = part * where(below > i32(0), load(deep, i), own_deep)
                if form == BOTH:
                    part = part + magnitude(own_discount - load(discounts, i))
                w = w * part
            elif form == SWAP:
                w = w * magnitude(own_discount - load(discounts, i))
            if tied:
                w = w * load(counts, i)
            u = own - load(x, i)
            if narrow:
                one, other = load(up, i) * own_down, load(down, i) * own_up
                f = where(one < other, one, other)
            else:
                f = exp_negative(below_zero(u * sigma))
            wu = w * u
            if kind == PAIR_ONES and form == FLAT and not weighted:
                factor = where(magnitude(w) > ZERO, f, ZERO)
                product = product * factor + (product + factor)
            else:
                terms = terms + magnitude(w) * log1p_unit(f)
            far = far + where(wu < ZERO, wu, ZERO)
            m = w * where(wu > ZERO, f, ONE) / (f + ONE)
            pulls = pulls + m
            if tied:
                m = m * own_count
            store(g, i, load(g, i) + m)
        whole += total(terms + log1p_positive(product) - far * sigma)
        pull += total(pulls)
    if tied:
        whole, pull = whole * own_count, pull * own_count
    write(g, a, read(g, a, f32) - pull)
    return whole


@inlined
def all_rows(
    kind: Any, form: Any, weighted: Any, low: Any, signed: Any, narrow: Any, origin: Any, end: Any, row: Any,
    buffer: Any, n: Any, table: Any, k: Any, mu: Any, sigma: Any,
) -> Any:  # fmt: skip
    """Add the pairs of all items to the gradients in the buffer; return their sum. See `arrange` and `row_sums`."""
    whole = 0.0
    for a in range(end):
        real = read(buffer + SECOND * row, a, f32) < INFINITY
        if real and (signed or read(buffer + FIRST * row, a, f32) > low):
            first_place = a // WIDTH * WIDTH if signed else 0
            split = origin if a >= origin and not weighted else end
            for tied in (True, False):
                start, stop = (first_place, split) if tied else (max(first_place, split), end)
                if start >= stop:
                    continue
                # One branch per form, each with constants that the compiler uses.
                rest = (a, start, stop, row, buffer, n, table, k, mu, sigma)
                if form == BOTH:
                    whole += row_sums(kind, BOTH, weighted, signed, narrow, tied, *rest)
                elif form == SWAP:
                    whole += row_sums(kind, SWAP, weighted, signed, narrow, weighted, *rest)
                elif form == NEAR:
                    whole += row_sums(kind, NEAR, weighted, signed, narrow, tied, *rest)
                elif kind == PAIR_ONES:
                    whole += row_sums(PAIR_ONES, FLAT, weighted, signed, narrow, weighted, *rest)
                else:
                    whole += row_sums(kind, FLAT, weighted, signed, narrow, weighted, *rest)
    return whole


@inlined
def arrange(b: Any, n: Any, ranks: Any, second: Any, weights: Any, buffer: Any, row: Any) -> Any:
    """Write the position of each item of list b to PLACE, -1 where masked.

    With ranks and without weights, items are in the order of their ranks, and the position is `origin` plus the rank
    minus 1. Items of equal rank have equal scores and labels. They have one position below `origin`, and COUNT is their
    number. If there are many of them, all items are there, and the other positions are not used.

    Returns:
        `origin`, one past the last position (multiples of WIDTH), and the number of valid items.
    """
    place, counts, twice, found = buffer + PLACE * row, buffer + COUNT * row, buffer + TWICE * row, buffer
    valid = 0
    for i in range(n):
        real = read(second, b * n + i, f32) < INFINITY
        key = np.int64(TWO * read(ranks, b * n + i, f32)) if ranks != 0 and weights == 0 else valid
        write(place, i, i32(key) if real else i32(-1))
        valid += real
    end = -(-valid // WIDTH) * WIDTH
    if ranks == 0 or weights != 0:
        return 0, end, valid
    for key in range(2 * n + 1):
        write(found, key, i32(0))
    alone, several = 0, 0
    for i in range(n):
        key = read(place, i, i32)
        if key >= 0:
            number = i32(read(found, key, i32) + 1)
            write(found, key, number)
            alone += (number == 1) - (number == 2)
            several += number == 2
    merged = alone + several < MERGED * valid
    origin = -(-(alone + several if merged else several) // WIDTH) * WIDTH
    end = origin if merged else origin + end
    for i in range(0, end, WIDTH):
        store(counts, i, splat(ONE))
        store(twice, i, splat(ZERO))
    at = 0
    for key in range(2 * n + 1):
        number = read(found, key, i32)
        if number > 1 or (merged and number == 1):
            write(counts, at, f32(number))
            write(twice, at, i32(key))
            write(found, key, i32(at))
            at += 1
        elif number == 1:
            write(twice, origin + (key >> 1) - 1, i32(key))
            write(found, key, i32(origin + (key >> 1) - 1))
    for i in range(n):
        key = read(place, i, i32)
        if key >= 0:
            write(place, i, read(found, key, i32))
    return origin, end, valid


@compiled
def pair_lists(
    number: Any, begin: Any, end: Any, n: Any, kind: Any, form: Any, x: Any, first: Any, second: Any, discounts: Any,
    ranks: Any, weights: Any, ks: Any, table: Any, deep: Any, mu: Any, sigma: Any, buffers: Any, size: Any,
    losses: Any, gradient: Any, finite: Any,
) -> None:  # fmt: skip
    """Write sum_ij w_ij log(1 + exp(-sigma (x_i - x_j))) and its gradient for lists begin <= b < end.

    Further arguments:
        kind: PAIR_ONES, PAIR_DIFFERENCES or PAIR_ROWS.
        form: FLAT, SWAP, NEAR or BOTH.
        weights: Weights of the items, (B, N), by which pairs are multiplied; 0 = none.
        ks: k of delta, (B,).
        table: Tables of `recsys_topk.ops.losses.pair_sums.delta_tables`.
        deep: Factor of delta for ranks beyond k, indexed by twice the rank.
        mu: Weight of delta.
        size: Twice N rounded up to a multiple of WIDTH.
        gradient: (B, N), written; 0 = no gradient.
        finite: (parts,) uint8, written: whether all scores are finite. Otherwise the rest is not written.
    """
    row = 4 * size
    buffer = buffers + number * ROWS * row
    places_of, counts, g = buffer + PLACE * row, buffer + COUNT * row, buffer + GRADIENT * row
    low = ZERO if kind == PAIR_ROWS else -INFINITY
    write(finite, number, np.uint8(1))
    for b in range(begin, end):
        origin, end_place, valid = arrange(b, n, ranks, second, weights, buffer, row)
        some = read(x, b * n, f32)
        for i in range(0, end_place, WIDTH):  # positions without an item are in no pair
            store(buffer, i, splat(some))
            store(buffer + FIRST * row, i, splat(-INFINITY))
            store(buffer + SECOND * row, i, splat(INFINITY))
            store(buffer + DISCOUNT * row, i, splat(ZERO))
            store(buffer + DEEP * row, i, splat(ONE))
            if weights != 0:
                store(counts, i, splat(ZERO))
                store(buffer + TWICE * row, i, splat(ONE))
            store(g, i, splat(ZERO))
        k, absolute, better = read(ks, b, f32), ZERO, 0
        for i in range(n):
            place, at = read(places_of, i, i32), b * n + i
            if place >= 0:
                value, own = read(x, at, f32), read(first, at, f32)
                write(buffer, place, value)
                write(buffer + FIRST * row, place, own)
                write(buffer + SECOND * row, place, read(second, at, f32))
                absolute += abs(value)
                better += own > low
                if discounts != 0:
                    write(buffer + DISCOUNT * row, place, read(discounts, at, f32))
                if weights != 0:
                    write(counts, place, read(weights, at, f32))
                if ranks != 0:
                    rank = read(ranks, at, f32)
                    if weights != 0:
                        write(buffer + TWICE * row, place, rank)
                    if k < INFINITY and rank > k:
                        near = log1p_positive(rank if rank > f32(1.5) else f32(1.5))
                        factor = near / (near - LOG_2) if weights != 0 else read(deep, np.int64(TWO * rank), f32)
                        write(buffer + DEEP * row, place, factor)
        if not absolute < INFINITY:
            write(finite, number, np.uint8(0))
            return
        narrow = exponentials(buffer, buffer + UP * row, buffer + DOWN * row, end_place, sigma)
        signed = 2 * better > valid and kind != PAIR_ROWS
        given = (low, signed, narrow, origin, end_place, row, buffer, n, table, k, mu, sigma)
        whole = all_rows(kind, form, True, *given) if weights != 0 else all_rows(kind, form, False, *given)
        write(losses, b, f32(whole))
        if gradient != 0:
            for i in range(n):
                place, slope = read(places_of, i, i32), ZERO
                if place >= 0:
                    slope = sigma * read(g, place, f32)
                    if place < origin:
                        slope = slope / read(counts, place, f32)
                write(gradient, b * n + i, slope)


@compiled
def count_lists(number: Any, begin: Any, end: Any, n: Any, first: Any, second: Any, weights: Any, counts: Any) -> None:
    """Write the number of pairs with first_i > second_j for lists begin <= b < end, float64; -inf is in no pair.

    With weights, (B, N), a pair counts with the product of the weights of its items; 0 = no weights.
    """
    for b in range(begin, end):
        found = 0.0
        for i in range(n):
            own = read(first, b * n + i, f32)
            if own > -INFINITY:
                below, heavy, rest = i32(0), splat(ZERO), n - n % WIDTH
                for j in range(0, rest, WIDTH):
                    lower = load(second, b * n + j) < own
                    if weights != 0:
                        heavy = heavy + where(lower, load(weights, b * n + j), ZERO)
                    else:
                        below += count(lower)
                whole = np.float64(below) + total(heavy)
                for j in range(rest, n):
                    if read(second, b * n + j, f32) < own:
                        whole += read(weights, b * n + j, f32) if weights != 0 else ONE
                found += whole * read(weights, b * n + i, f32) if weights != 0 else whole
        write(counts, b, found)
