"""Ranks of the items of lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.compiled.arithmetic import INFINITY, ZERO, f32, i32, ordered
from recsys_topk.ops.compiled.build import compiled


@compiled
def pack_lists(begin: Any, end: Any, x: Any, mask: Any, packed: Any) -> Any:
    """Write integers that sort the items by descending score, masked items last; the lower 32 bits are the index.

    Returns:
        Whether all valid scores are finite.
    """
    n = x.shape[1]
    masked = mask.shape[0] > 0
    finite = i32(1)
    for b in range(begin, end):
        for i in range(n):
            value = x[b, i] + ZERO  # -0 becomes 0
            real = not masked or mask[b, i]
            finite &= i32(abs(value) < INFINITY) | i32(not real)
            order = np.int64(~ordered(value)) if real else np.int64(0x7FFFFFFF)
            packed[b, i] = (order << np.int64(32)) | np.int64(i)
    return finite > 0


@compiled
def rank_lists(begin: Any, end: Any, packed: Any, valid: Any, ranks: Any) -> Any:
    """Write the ranks from sorted integers of `pack_lists`; return whether two valid scores of a list are equal."""
    n = packed.shape[1]
    ties = False
    for b in range(begin, end):
        for place in range(n):
            one = packed[b, place]
            ranks[b, one & np.int64(0xFFFFFFFF)] = f32(place + 1)
            if place > 0 and place < valid[b]:
                ties |= (one >> np.int64(32)) == (packed[b, place - 1] >> np.int64(32))
    return ties
