"""Ranks of the items of lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import HALF, INFINITY, TWO, f32, i32, ordered
from recsys_topk.ops.backends.compiled.build import compiled, inlined
from recsys_topk.ops.backends.compiled.memory import read, write

FEW = 6  # up to this number of tied items, or of different labels of them, no sort is needed


@compiled
def sort_key(value: Any) -> Any:
    """Return an int32 that sorts like a float32; 0 and -0 are equal, even if the compiler drops -0 + 0."""
    key = ordered(value)
    return key + i32(key == i32(-1))


@compiled
def pack_lists(part: Any, begin: Any, end: Any, x: Any, mask: Any, packed: Any, finite: Any) -> None:
    """Write integers that sort the items by descending score, masked items last; the lower 32 bits are the index.

    Whether all valid scores are finite goes to finite[part].
    """
    n = x.shape[1]
    masked = mask.shape[0] > 0
    known = i32(1)
    for b in range(begin, end):
        for i in range(n):
            value = x[b, i]
            real = not masked or mask[b, i]
            known &= i32(abs(value) < INFINITY) | i32(not real)
            order = np.int64(~sort_key(value)) if real else np.int64(0x7FFFFFFF)
            packed[b, i] = (order << np.int64(32)) | np.int64(i)
    finite[part] = known > 0


@compiled
def sort_range(x: Any, begin: Any, end: Any) -> None:
    """Sort x[begin:end] in place by comb sort: insertion sort after passes that swap distant items."""
    gap = end - begin
    swapped = True
    while gap > 1 or swapped:
        gap = max(1, gap * 10 // 13)
        swapped = False
        for i in range(begin, end - gap):
            if x[i + gap] < x[i]:
                x[i], x[i + gap] = x[i + gap], x[i]
                swapped = True


@compiled
def move_lowest(x: Any, begin: Any, end: Any) -> Any:
    """Move the integers with the lowest upper half to the front of x[begin:end]; return the position after them."""
    lowest = x[begin] >> np.int64(32)
    for i in range(begin, end):
        half = x[i] >> np.int64(32)
        lowest = half if half < lowest else lowest
    front = begin
    for i in range(begin, end):
        one, other = x[i], x[front]
        found = (one >> np.int64(32)) == lowest
        x[front], x[i] = (one, other) if found else (other, one)
        front += found
    return front


@compiled
def next_change(x: Any, begin: Any, end: Any) -> Any:
    """Return the first position after `begin` and before `end` with another upper half of the integer, or `end`."""
    place = begin + 1
    while place < end and (x[place] >> np.int64(32)) == (x[begin] >> np.int64(32)):
        place += 1
    return place


@compiled
def rank_lists(part: Any, begin: Any, end: Any, packed: Any, valid: Any, labels: Any, ranks: Any) -> None:
    """Write the ranks from sorted integers of `pack_lists`; see `recsys_topk.ops.selection.ranks.tie_ranks`."""
    n, low = packed.shape[1], np.int64(0xFFFFFFFF)
    for b in range(begin, end):
        order = packed[b]
        for place in range(valid[b], n):
            ranks[b, order[place] & low] = f32(n)
        first = 0
        while first < valid[b]:
            last = next_change(order, first, valid[b])
            if last == first + 1:
                ranks[b, order[first] & low] = f32(last)
                first = last
                continue
            # Equal scores: the lowest label is next. Equal labels get the mean of their ranks.
            if last <= first + FEW:
                for i in range(first, last):
                    label = labels[b, order[i] & low]
                    twice: Any = 2 * first + 1
                    for j in range(first, last):
                        other = labels[b, order[j] & low]
                        twice += i32(other < label) + i32(other <= label)
                    ranks[b, order[i] & low] = f32(twice) * HALF
                first = last
                continue
            for i in range(first, last):
                item = order[i] & low
                order[i] = (np.int64(sort_key(labels[b, item])) << np.int64(32)) | item
            passes = 0
            while first < last:
                passes += 1
                if passes <= FEW:
                    same = move_lowest(order, first, last)
                else:
                    if passes == FEW + 1:
                        sort_range(order, first, last)
                    same = next_change(order, first, last)
                for i in range(first, same):
                    ranks[b, order[i] & low] = f32(first + same + 1) * HALF
                first = same


@inlined
def discounts_up_to(sums: Any, amount: Any, most: Any) -> Any:
    """Return the sum of the discounts of the first places, as many as the smaller of two numbers."""
    amount = amount if amount < most else most
    whole = np.int64(amount)
    before = read(sums, whole, np.float64)
    return before + (amount - np.float64(whole)) * (read(sums, whole + 1, np.float64) - before)


@compiled
def weigh_lists(
    number: Any, begin: Any, end: Any, n: Any, ranks: Any, weights: Any, ks: Any, sums: Any, buffers: Any, result: Any
) -> None:
    """Write the mean rank of the copies of each item, an item of weight w having w copies, or their mean discount.

    Further arguments:
        ranks: (B, N), of the items.
        ks: (B,) float64, the number of places with a discount; 0 = all.
        sums: float64, the sums of the first 0, 1, ... discounts, more than the sum of the weights; 0 = write ranks.
        buffers: (parts, 2 N + 1) float64.
    """
    held = buffers + number * 8 * (2 * n + 1)
    for b in range(begin, end):
        most, above = read(ks, b, np.float64) if ks != 0 else np.inf, 0.0
        for key in range(2 * n + 1):
            write(held, key, 0.0)
        for i in range(n):
            place = np.int64(TWO * read(ranks, b * n + i, f32))
            write(held, place, read(held, place, np.float64) + read(weights, b * n + i, f32))
        for key in range(2 * n + 1):
            own = read(held, key, np.float64)
            value = 0.0
            if sums == 0:
                value = 1.0 + above + (0.5 * (own - 1.0) if own > 1.0 else 0.0)
            elif own > 0.0:
                value = (discounts_up_to(sums, above + own, most) - discounts_up_to(sums, above, most)) / own
            write(held, key, value)
            above += own
        for i in range(n):
            place = np.int64(TWO * read(ranks, b * n + i, f32))
            write(result, b * n + i, f32(read(held, place, np.float64)))
