"""Sums along lists, from item to item."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import INFINITY, LOWEST, ONE, ZERO, exp_negative, f32, log_positive
from recsys_topk.ops.backends.compiled.build import compiled
from recsys_topk.ops.backends.compiled.lanes import splat
from recsys_topk.ops.backends.compiled.memory import load, read, store, write
from recsys_topk.ops.backends.task import WIDTH


@compiled
def recurrence_lists(part: Any, begin: Any, end: Any, n: Any, a: Any, b: Any, reverse: Any, result: Any) -> None:
    """Write s_i = a_i s_{i-1} + b_i for lists begin <= l < end, from the end if `reverse`; (B, N) float32 addresses."""
    for one in range(begin, end):
        total = ZERO
        for i in range(n):
            at = one * n + (n - 1 - i if reverse else i)
            total = read(a, at, f32) * total + read(b, at, f32)
            write(result, at, total)


@compiled
def plackett_luce_lists(
    part: Any, begin: Any, end: Any, n: Any, x: Any, labels: Any, terms: Any, items: Any, order: Any, valid: Any,
    buffers: Any, size: Any, losses: Any, gradient: Any, known: Any,
) -> None:  # fmt: skip
    """Write the loss and gradient of `recsys_topk.ops.losses.plackett_luce` for lists begin <= b < end.

    Further arguments:
        items: Address of (B, N) float32, the weights of the items; 0 = all 1.
        order: (B, N) int64, whose lower half is the item at each place of the descending order of the labels.
        valid: (B,) int64, the number of valid items, which are first in the order.
        known: (parts,) uint8, written: whether the scores of no list differ by more than 80. Otherwise the rest is not
            written.
    """
    weights, sums = buffers + 8 * part * size, buffers + 8 * part * size + 4 * size
    low_half = np.int64(0xFFFFFFFF)
    write(known, part, np.uint8(1))
    for b in range(begin, end):
        m, start = read(valid, b, np.int64), b * n
        low, high = INFINITY, -INFINITY
        for place in range(m):
            value = read(x, start + (read(order, start + place, np.int64) & low_half), f32)
            low, high = min(low, value), max(high, value)
            write(weights, place, value)
        if not low - high >= LOWEST and m > 0:
            write(known, part, np.uint8(0))
            return
        for i in range(0, -(-m // WIDTH) * WIDTH, WIDTH):
            store(weights, i, exp_negative(load(weights, i) - splat(high)))
        # From the last place on: the sum over the items whose label is not larger.
        loss, total, last = 0.0, 0.0, m
        count: Any = 0.0
        for back in range(m):
            place = m - 1 - back
            item = start + (read(order, start + place, np.int64) & low_half)
            copies = read(items, item, f32) if items != 0 else ONE
            write(weights, place, read(weights, place, f32) * copies)
            total += read(weights, place, f32)
            if read(terms, item, np.uint8) != 0:
                count += copies
                loss += copies * (high - read(x, item, f32))
            above = start + (read(order, start + place - 1, np.int64) & low_half) if place > 0 else item
            if place == 0 or read(labels, above, f32) != read(labels, item, f32):
                # `sums` holds the weight of the terms of the group over its sum, at its first place, and 0 elsewhere.
                for i in range(place + 1, last):
                    write(sums, i, ZERO)
                write(sums, place, f32(count / total) if count > 0 else ZERO)
                if count > 0:
                    loss += count * log_positive(f32(total))
                last, count = place, 0.0
        write(losses, b, f32(loss))
        pressure = 0.0
        for place in range(n):
            item = start + (read(order, start + place, np.int64) & low_half)
            if place < m:
                pressure += read(sums, place, f32)
                one = f32(read(terms, item, np.uint8) != 0) * (read(items, item, f32) if items != 0 else ONE)
                write(gradient, item, f32(read(weights, place, f32) * pressure) - one)
            else:
                write(gradient, item, ZERO)
