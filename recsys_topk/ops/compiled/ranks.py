"""Ranks of the items of lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys_topk.ops.compiled.arithmetic import INFINITY, ZERO, f32, i32, ordered
from recsys_topk.ops.compiled.build import loop


@loop
def pack_lists(part: Any, begin: Any, end: Any, x: Any, mask: Any, packed: Any, finite: Any) -> None:
    """Write integers that sort the items by descending score, masked items last; the lower 32 bits are the index.

    Whether all valid scores are finite goes to finite[part].
    """
    n = x.shape[1]
    masked = mask.shape[0] > 0
    known = i32(1)
    for b in range(begin, end):
        for i in range(n):
            value = x[b, i] + ZERO  # -0 becomes 0
            real = not masked or mask[b, i]
            known &= i32(abs(value) < INFINITY) | i32(not real)
            order = np.int64(~ordered(value)) if real else np.int64(0x7FFFFFFF)
            packed[b, i] = (order << np.int64(32)) | np.int64(i)
    finite[part] = known > 0


@loop
def rank_lists(part: Any, begin: Any, end: Any, packed: Any, valid: Any, ranks: Any, tied: Any) -> None:
    """Write the ranks from sorted integers of `pack_lists`, and to tied[part] whether a list has equal valid scores."""
    n = packed.shape[1]
    ties = False
    for b in range(begin, end):
        for place in range(n):
            one = packed[b, place]
            ranks[b, one & np.int64(0xFFFFFFFF)] = f32(place + 1)
            if place > 0 and place < valid[b]:
                ties |= (one >> np.int64(32)) == (packed[b, place - 1] >> np.int64(32))
    tied[part] = ties
