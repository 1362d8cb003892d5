"""Soft ranks: sums of logistic comparisons of an item with all others."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import ONE, ZERO, below_zero, exp_negative, f32, i32
from recsys_topk.ops.backends.compiled.build import compiled, inlined
from recsys_topk.ops.backends.compiled.lanes import places, splat, total, where
from recsys_topk.ops.backends.compiled.memory import load, read, store, write
from recsys_topk.ops.backends.compiled.pairs import exponentials
from recsys_topk.ops.backends.task import WIDTH

X, UP, DOWN, WEIGHT, SUM, ITEM, COPIES = range(7)  # rows of the buffer
ROWS = 7


@inlined
def compare_row(
    backward: Any, every: Any, weighted: Any, narrow: Any, a: Any, begin: Any, size: Any, m: Any, buffer: Any, row: Any,
    steep: Any,
) -> None:  # fmt: skip
    """Add the comparisons of item a to SUM, those of the ranks or those of their gradient.

    With `every`, item a is compared with the items after it, and both get their part. Otherwise only the rank of a
    counts, and a is compared with all items.
    """
    x, up, down = buffer + X * row, buffer + UP * row, buffer + DOWN * row
    weights, sums = buffer + WEIGHT * row, buffer + SUM * row
    own, own_up, own_down, weight = read(x, a, f32), read(up, a, f32), read(down, a, f32), read(weights, a, f32)
    copies = buffer + COPIES * row
    own_copies = read(copies, a, f32) if weighted else ONE
    mine = splat(ZERO)
    for i in range(begin, size, WIDTH):
        place = places(i32(i))
        counts = (place > i32(a)) & (place < i32(m)) if every else place < i32(m)
        if narrow:
            ahead, behind = load(up, i) * own_down, load(down, i) * own_up
            f, above = where(ahead < behind, ahead, behind), ahead > behind
        else:
            gap = (load(x, i) - own) * steep
            f, above = exp_negative(below_zero(gap)), gap > ZERO
        inverse = ONE / (f + ONE)
        if backward:  # p (1 - p) times the difference of the weights
            # The weights of the items are in those of the ranks: dL/dr_i w_j - dL/dr_j w_i.
            other = load(weights, i) if every else splat(ZERO)
            difference = weight * load(copies, i) - other * own_copies if weighted else weight - other
            pull = where(counts, f * inverse * inverse * difference, ZERO)
            mine = mine - pull
            store(sums, i, load(sums, i) + pull)
        else:
            p = where(above, ONE, f) * inverse
            if weighted:
                p = p * load(copies, i)
            mine = mine + where(counts, p, ZERO)
            if every:
                store(sums, i, load(sums, i) + where(counts, where(above, f, ONE) * inverse * own_copies, ZERO))
    write(sums, a, read(sums, a, f32) + total(mine))


@compiled
def rank_comparisons(
    number: Any, begin: Any, end: Any, n: Any, backward: Any, x: Any, wanted: Any, mask: Any, items: Any, weights: Any,
    steep: Any, buffers: Any, size: Any, result: Any,
) -> None:  # fmt: skip
    """Write the soft ranks of lists begin <= b < end, or the gradient of their weighted sum.

    Further arguments:
        backward: Whether to write the gradient.
        items: Address of (B, N) float32, the weights of the items; 0 = all 1.
        weights: Address of (B, N) float32, the gradients of the ranks; 0 if not `backward`.
        result: Address of (B, N) float32, written.
    """
    row = 4 * size
    buffer = buffers + number * ROWS * row
    for b in range(begin, end):
        m, few = 0, 0
        for i in range(0, size, WIDTH):
            store(buffer + SUM * row, i, splat(ZERO))
        for i in range(n):
            if mask == 0 or read(mask, b * n + i, np.uint8) != 0:
                chosen = read(wanted, b * n + i, np.uint8) != 0
                weight = ONE if chosen else ZERO
                if backward and chosen:
                    weight = read(weights, b * n + i, f32)
                write(buffer, m, read(x, b * n + i, f32))
                write(buffer + WEIGHT * row, m, weight)
                write(buffer + ITEM * row, m, i32(i))
                write(buffer + COPIES * row, m, read(items, b * n + i, f32) if items != 0 else ONE)
                few += chosen
                m += 1
            write(result, b * n + i, ZERO if backward else ONE)
        padded = -(-m // WIDTH) * WIDTH
        for i in range(m, padded):
            write(buffer, i, read(buffer, 0, f32))
            write(buffer + WEIGHT * row, i, ZERO)
            write(buffer + COPIES * row, i, ZERO)
        narrow = exponentials(buffer, buffer + UP * row, buffer + DOWN * row, padded, steep)
        every = 2 * few > m
        for a in range(m):
            if every or read(wanted, b * n + read(buffer + ITEM * row, a, i32), np.uint8) != 0:
                first = a // WIDTH * WIDTH if every else 0
                if backward:
                    compare_row(True, every, items != 0, narrow, a, first, padded, m, buffer, row, steep)
                else:
                    compare_row(False, every, items != 0, narrow, a, first, padded, m, buffer, row, steep)
        for a in range(m):
            item = b * n + read(buffer + ITEM * row, a, i32)
            value = read(buffer + SUM * row, a, f32)
            if backward:
                write(result, item, value * steep)
            elif read(wanted, item, np.uint8) != 0:
                # A comparison with itself is 1 / 2 of its weight; an item of weight w has w copies, or none below 1.
                copies = read(buffer + COPIES * row, a, f32)
                itself = f32(0.5) * copies if every else ZERO
                write(result, item, value + itself + (ONE - f32(0.5) * (copies if copies < ONE else ONE)))
