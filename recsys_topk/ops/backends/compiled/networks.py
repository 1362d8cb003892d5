"""Relaxed sorting networks. A vector holds one wire of 16 lists."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import HALF, ONE, ZERO, f32, i32, magnitude
from recsys_topk.ops.backends.compiled.build import compiled, inlined
from recsys_topk.ops.backends.compiled.lanes import bits_of, splat, where
from recsys_topk.ops.backends.compiled.memory import load, read, store, write
from recsys_topk.ops.backends.task import WIDTH

# atan on [0, tan(pi / 8)], to 2e-7 (Cephes).
A1, A2, A3, A4 = f32(-3.33329491539e-1), f32(1.99777106478e-1), f32(-1.38776856032e-1), f32(8.05374449538e-2)
TAN_PI_8, TAN_3_PI_8 = f32(0.4142135624), f32(2.414213562)
PI_4, PI_2, INVERSE_PI = f32(math.pi / 4), f32(math.pi / 2), f32(1.0 / math.pi)


@inlined
def arctangent(x: Any) -> Any:
    """Return atan(x)."""
    size = magnitude(x)
    far, middle = size > TAN_3_PI_8, size > TAN_PI_8
    above = where(far, splat(-ONE), where(middle, size - ONE, size))
    below = where(far, size, where(middle, size + ONE, ONE))
    t = above / below
    z = t * t
    series = ((z * A4 + A3) * z + A2) * z + A1
    value = where(far, splat(PI_2), where(middle, splat(PI_4), ZERO)) + (series * z * t + t)
    return where(x < ZERO, splat(ZERO) - value, value)


@inlined
def copy_wires(source: Any, first: Any, last: Any, width: Any, wires: Any) -> None:
    """Copy the lists first <= b < last of a (B, width) array to vectors, one per wire; 0 in the other lanes."""
    for w in range(width):
        store(wires, w * WIDTH, splat(ZERO))
    for b in range(first, last):
        for w in range(width):
            write(wires, w * WIDTH + b - first, read(source, b * width + w, f32))


@compiled
def network_lists(
    part: Any, begin: Any, end: Any, groups: Any, lists: Any, width: Any, size: Any, comparators: Any, x: Any,
    bounds: Any, steep: Any, grad_p: Any, grad_q: Any, buffers: Any, p: Any, q: Any, gradient: Any,
) -> None:  # fmt: skip
    """Run the network of `recsys_topk.operators.diffsort.network_masses` on groups of 16 lists.

    Further arguments:
        begin: First group.
        end: One past the last group.
        groups: Number of groups.
        lists: Number of lists B.
        width: Number of wires.
        size: Number of comparators.
        comparators: (size, 4) int32, in order: lower wire, upper wire, direction, and the number of wires that a list
            must exceed to use it.
        bounds: (groups, 3, 16) int32: the first wire of each list, the end of its wires, and the first of the k best.
        grad_p: (B, width), the gradient of p; 0 = forward only.
        buffers: (parts, 3 * width + 4 * size, 16), overwritten.
        gradient: (B, width), written in the backward pass.
    """
    vector = 4 * WIDTH
    wires = buffers + part * (3 * width + 4 * size) * vector
    ups, downs = wires + width * vector, wires + 2 * width * vector
    shares = wires + 3 * width * vector
    gaps, up_gaps, down_gaps = shares + size * vector, shares + 2 * size * vector, shares + 3 * size * vector
    for group in range(begin, end):
        first, last = group * WIDTH, min(group * WIDTH + WIDTH, lists)
        bound = bounds + group * 3 * vector
        starts, stops, best = bits_of(load(bound, 0)), bits_of(load(bound, WIDTH)), bits_of(load(bound, 2 * WIDTH))
        copy_wires(x, first, last, width, wires)
        for c in range(size):
            low, high = np.int64(read(comparators, 4 * c, i32)), np.int64(read(comparators, 4 * c + 1, i32))
            direction, least = read(comparators, 4 * c + 2, i32), read(comparators, 4 * c + 3, i32)
            a, b = load(wires, low * WIDTH), load(wires, high * WIDTH)
            share = arctangent((b - a) * (f32(direction) * steep)) * INVERSE_PI + HALF
            share = where((starts <= i32(low)) & (stops > i32(high)) & (stops > least), share, ONE)
            lower = share * a + (ONE - share) * b
            store(wires, low * WIDTH, lower)
            store(wires, high * WIDTH, a + b - lower)
            store(shares, c * WIDTH, share)
            store(gaps, c * WIDTH, a - b)
        for w in range(width):
            chosen = where(best <= i32(w), splat(ONE), ZERO)
            store(ups, w * WIDTH, chosen)
            store(downs, w * WIDTH, splat(ONE) - chosen)
        for back in range(size):
            c = size - 1 - back
            low, high = np.int64(read(comparators, 4 * c, i32)), np.int64(read(comparators, 4 * c + 1, i32))
            share = load(shares, c * WIDTH)
            for side in range(2):
                mass, kept = (ups, up_gaps) if side == 0 else (downs, down_gaps)
                a, b = load(mass, low * WIDTH), load(mass, high * WIDTH)
                store(mass, low * WIDTH, share * a + (ONE - share) * b)
                store(mass, high * WIDTH, (ONE - share) * a + share * b)
                store(kept, c * WIDTH, a - b)
        if grad_p == 0:
            for b in range(first, last):
                for w in range(width):
                    write(p, b * width + w, read(ups, w * WIDTH + b - first, f32))
                    write(q, b * width + w, read(downs, w * WIDTH + b - first, f32))
            continue
        copy_wires(grad_p, first, last, width, ups)
        copy_wires(grad_q, first, last, width, downs)
        # Back through the masses, in the order of the network. The gradients of the shares replace the gaps of `ups`.
        for c in range(size):
            low, high = np.int64(read(comparators, 4 * c, i32)), np.int64(read(comparators, 4 * c + 1, i32))
            share, slope = load(shares, c * WIDTH), splat(ZERO)
            for side in range(2):
                mass, kept = (ups, up_gaps) if side == 0 else (downs, down_gaps)
                a, b = load(mass, low * WIDTH), load(mass, high * WIDTH)
                store(mass, low * WIDTH, share * a + (ONE - share) * b)
                store(mass, high * WIDTH, (ONE - share) * a + share * b)
                slope = slope + load(kept, c * WIDTH) * (a - b)
            store(up_gaps, c * WIDTH, slope)
        for w in range(width):
            store(ups, w * WIDTH, splat(ZERO))
        # Back through the values.
        for back in range(size):
            c = size - 1 - back
            low, high = np.int64(read(comparators, 4 * c, i32)), np.int64(read(comparators, 4 * c + 1, i32))
            direction, least = read(comparators, 4 * c + 2, i32), read(comparators, 4 * c + 3, i32)
            share, gap = load(shares, c * WIDTH), load(gaps, c * WIDTH)
            a, b = load(ups, low * WIDTH), load(ups, high * WIDTH)
            change = a - b
            factor = f32(direction) * steep
            z = gap * factor
            density = INVERSE_PI / (z * z + ONE) * factor
            slope = (load(up_gaps, c * WIDTH) + gap * change) * density
            slope = where((starts <= i32(low)) & (stops > i32(high)) & (stops > least), slope, ZERO)
            store(ups, low * WIDTH, share * change + b - slope)
            store(ups, high * WIDTH, (ONE - share) * change + b + slope)
        for b in range(first, last):
            for w in range(width):
                write(gradient, b * width + w, read(ups, w * WIDTH + b - first, f32))
