"""Inner loops compiled for the CPU by numba: one pass where torch needs one for each operation.

Importing this module imports numba and compiles nothing; each function is compiled at its first call (a few seconds)
and kept on disk for later processes. Only float32 and int64 arrays are passed, so that each is compiled once. Indices
are trusted, except those of the tables: `compiled.checked` looks at the others first. Four candidates are treated at a
time, so that a row of the history is read once for four of them; the last few of a list are padded with the last one.
A comparison is written `0 if x < 0 else x`, so that NaN stays NaN as in `relu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Compiled = TypeVar("Compiled", bound=Callable[..., Any])

ZERO = np.float32(0.0)


def compiled(function: Compiled) -> Compiled:
    """Compile without the GIL; sums may be reordered (else they are not vectorised), NaN and infinity are kept."""
    flags = {"reassoc", "contract", "nsz", "arcp"}
    made: Any = numba.njit(nogil=True, cache=True, fastmath=flags, error_model="numpy")(function)
    return cast(Compiled, made)


@compiled
def attention_forward(
    first: int,
    last: int,
    history: Floats,
    lengths: Integers,
    items: Floats,
    candidates: Integers,
    weight: Floats,
    logits: Floats,
) -> None:
    """logits[b, n, l] = sum_h weight_h relu(history[b, l, h] + items[candidates[b, n], h]) for first <= b < last.

    Views at or after lengths[b] get 0.
    """
    width, number = history.shape[2], candidates.shape[1]
    for b in range(first, last):
        logits[b, :, lengths[b] :] = ZERO
        for n in range(0, number, 4):
            n1, n2, n3 = min(n + 1, number - 1), min(n + 2, number - 1), min(n + 3, number - 1)
            q0, q1 = items[candidates[b, n]], items[candidates[b, n1]]
            q2, q3 = items[candidates[b, n2]], items[candidates[b, n3]]
            for l in range(lengths[b]):  # noqa: E741
                view = history[b, l]
                s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
                for h in range(width):
                    x, w = view[h], weight[h]
                    y0, y1, y2, y3 = x + q0[h], x + q1[h], x + q2[h], x + q3[h]
                    s0 += (ZERO if y0 < ZERO else y0) * w
                    s1 += (ZERO if y1 < ZERO else y1) * w
                    s2 += (ZERO if y2 < ZERO else y2) * w
                    s3 += (ZERO if y3 < ZERO else y3) * w
                logits[b, n, l] = s0
                logits[b, n1, l] = s1
                logits[b, n2, l] = s2
                logits[b, n3, l] = s3


@compiled
def attention_backward(
    first: int,
    last: int,
    history: Floats,
    lengths: Integers,
    items: Floats,
    candidates: Integers,
    weight: Floats,
    grad: Floats,
    grad_history: Floats,
    grad_items: Floats,
    grad_weight: Floats,
) -> None:
    """Add the gradients of `attention_forward`, with s = grad [history + items > 0].

    grad_history = weight sum_n s. grad_items is left without the factor weight (sum_l s, added up over the lists), and
    grad_weight gets the history's share of sum s (history + items), since both follow from the sums for nothing.
    """
    width, number = history.shape[2], candidates.shape[1]
    sums = np.empty((4, width), np.float32)
    a0, a1, a2, a3 = sums[0], sums[1], sums[2], sums[3]
    for b in range(first, last):
        for n in range(0, number, 4):
            n1, n2, n3 = min(n + 1, number - 1), min(n + 2, number - 1), min(n + 3, number - 1)
            q0, q1 = items[candidates[b, n]], items[candidates[b, n1]]
            q2, q3 = items[candidates[b, n2]], items[candidates[b, n3]]
            sums[:] = ZERO
            for l in range(lengths[b]):  # noqa: E741
                view, out = history[b, l], grad_history[b, l]
                g0 = grad[b, n, l]
                g1 = grad[b, n1, l] if n + 1 < number else ZERO
                g2 = grad[b, n2, l] if n + 2 < number else ZERO
                g3 = grad[b, n3, l] if n + 3 < number else ZERO
                for h in range(width):
                    x = view[h]
                    s0 = g0 if x + q0[h] > ZERO else ZERO
                    s1 = g1 if x + q1[h] > ZERO else ZERO
                    s2 = g2 if x + q2[h] > ZERO else ZERO
                    s3 = g3 if x + q3[h] > ZERO else ZERO
                    a0[h] += s0
                    a1[h] += s1
                    a2[h] += s2
                    a3[h] += s3
                    out[h] += (s0 + s1) + (s2 + s3)
            for i in range(min(4, number - n)):
                target, total = grad_items[candidates[b, n + i]], sums[i]
                for h in range(width):
                    target[h] += total[h]
        for l in range(lengths[b]):  # noqa: E741
            view, out = history[b, l], grad_history[b, l]
            for h in range(width):
                grad_weight[h] += out[h] * view[h]
                out[h] *= weight[h]


@compiled
def embed_rows(ids: Integers, column: int, table: Floats, padding: int, out: Floats, start: int) -> int:
    """out[r, start:start + D] = table[ids[r, column]], or 0 for the padding id.

    Returns the first row whose id is not in the table, or -1; nothing is read outside the table.
    """
    rows, dim = table.shape
    for r in range(ids.shape[0]):
        i = ids[r, column]
        if i < 0 or i >= rows:
            return r
        target = out[r, start : start + dim]
        if i == padding:
            target[:] = ZERO
        else:
            source = table[i]
            for d in range(dim):
                target[d] = source[d]
    return -1


@compiled
def embed_rows_backward(ids: Integers, column: int, padding: int, grad: Floats, start: int, grad_table: Floats) -> None:
    """Add the gradient of `embed_rows` to that of the table, row after row."""
    dim = grad_table.shape[1]
    for r in range(ids.shape[0]):
        i = ids[r, column]
        if i != padding:
            source, target = grad[r, start : start + dim], grad_table[i]
            for d in range(dim):
                target[d] += source[d]


@compiled
def embed_means(
    ids: Integers, lengths: Integers, column: int, table: Floats, padding: int, out: Floats, start: int
) -> int:
    """out[b, start:start + D] = mean of table[ids[b, l, column]] over l < lengths[b]; padding ids count as 0.

    Returns the first request with an id that is not in the table, or -1.
    """
    rows, dim = table.shape
    for b in range(ids.shape[0]):
        target = out[b, start : start + dim]
        target[:] = ZERO
        for l in range(lengths[b]):  # noqa: E741
            i = ids[b, l, column]
            if i < 0 or i >= rows:
                return b
            if i != padding:
                source = table[i]
                for d in range(dim):
                    target[d] += source[d]
        share = np.float32(1.0) / np.float32(max(lengths[b], 1))
        for d in range(dim):
            target[d] *= share
    return -1


@compiled
def embed_means_backward(
    ids: Integers, lengths: Integers, column: int, padding: int, grad: Floats, start: int, grad_table: Floats
) -> None:
    """Add the gradient of `embed_means` to that of the table."""
    dim = grad_table.shape[1]
    scaled = np.empty(dim, np.float32)
    for b in range(ids.shape[0]):
        share = np.float32(1.0) / np.float32(max(lengths[b], 1))
        for d in range(dim):
            scaled[d] = grad[b, start + d] * share
        for l in range(lengths[b]):  # noqa: E741
            i = ids[b, l, column]
            if i != padding:
                target = grad_table[i]
                for d in range(dim):
                    target[d] += scaled[d]


@compiled
def join_forward(first: int, last: int, hidden: Floats, items: Floats, candidates: Integers, requests: Floats) -> None:
    """hidden[b, n] = relu(hidden[b, n] + items[candidates[b, n]] + requests[b]), in place, for first <= b < last."""
    width = hidden.shape[2]
    for b in range(first, last):
        request = requests[b]
        for n in range(candidates.shape[1]):
            target, item = hidden[b, n], items[candidates[b, n]]
            for h in range(width):
                x = target[h] + item[h] + request[h]
                target[h] = ZERO if x < ZERO else x


@compiled
def join_backward(
    first: int,
    last: int,
    hidden: Floats,
    candidates: Integers,
    grad: Floats,
    grad_hidden: Floats,
    grad_items: Floats,
    grad_requests: Floats,
) -> None:
    """Write grad [hidden > 0] to grad_hidden, and add it up by pool item and by request."""
    width = hidden.shape[2]
    for b in range(first, last):
        request = grad_requests[b]
        for n in range(candidates.shape[1]):
            value, upstream, target = hidden[b, n], grad[b, n], grad_hidden[b, n]
            item = grad_items[candidates[b, n]]
            for h in range(width):
                s = upstream[h] if value[h] > ZERO else ZERO
                target[h] = s
                item[h] += s
                request[h] += s


@compiled
def dot_forward(first: int, last: int, requests: Floats, items: Floats, candidates: Integers, scores: Floats) -> None:
    """scores[b, n] = requests[b] . items[candidates[b, n]] for first <= b < last."""
    for b in range(first, last):
        request = requests[b]
        for n in range(candidates.shape[1]):
            item = items[candidates[b, n]]
            s = ZERO
            for h in range(request.shape[0]):
                s += request[h] * item[h]
            scores[b, n] = s


@compiled
def dot_backward(
    first: int,
    last: int,
    requests: Floats,
    items: Floats,
    candidates: Integers,
    grad: Floats,
    grad_requests: Floats,
    grad_items: Floats,
) -> None:
    """Add the gradients of `dot_forward`."""
    for b in range(first, last):
        request, own = requests[b], grad_requests[b]
        for n in range(candidates.shape[1]):
            item, target, g = items[candidates[b, n]], grad_items[candidates[b, n]], grad[b, n]
            for h in range(request.shape[0]):
                own[h] += g * item[h]
                target[h] += g * request[h]
