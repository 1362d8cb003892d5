"""How a compiled loop reads its task, takes parts of it and writes results. See `recsys_topk.ops.task`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types

from recsys_topk.ops.compiled.build import inlined, native
from recsys_topk.ops.compiled.lanes import intrinsic, places, splat
from recsys_topk.ops.compiled.memory import claim, read, store_where, write
from recsys_topk.ops.task import TASK, WIDTH

RECORD = numba.from_dtype(TASK)


@intrinsic
def task_at(context: Any, address: Any) -> Any:
    """Return the task at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(RECORD))

    return RECORD(types.int64), generate


NEXT, WORKERS = (TASK.names.index(name) * 8 for name in ("next", "workers"))  # type: ignore[union-attr]


@inlined
def buffer_of(address: Any) -> Any:
    """Return the address of a buffer for the thread that calls this, once."""
    task = task_at(address)
    return task.buffers + claim(address + WORKERS) * task.buffer


@inlined
def take(address: Any) -> Any:
    """Return a part that no thread has taken, its first list, and the one past its last; (-1, 0, 0) = none is left."""
    task = task_at(address)
    part = claim(address + NEXT)
    if part >= task.parts:
        return -1, 0, 0
    return part, part * task.lists // task.parts, (part + 1) * task.lists // task.parts


@inlined
def rows_of(task: Any, b: Any) -> Any:
    """Return the addresses of the scores, labels, mask and gradient of list b; 0 for what there is not."""
    before = b * task.items
    mask = task.mask + before if task.mask != 0 else 0
    gradient = task.gradient + 4 * before if task.gradient != 0 else 0
    return task.scores + 4 * before, task.labels + 4 * before, mask, gradient


@inlined
def wanted_of(task: Any, b: Any) -> Any:
    """Return the k of list b; -1 = its number of positives."""
    return read(task.ks, b, np.int64) if task.ks != 0 else task.k


@inlined
def end_list(task: Any, b: Any, state: Any, loss: Any) -> Any:
    """Write the loss of list b, whether it counts, and a gradient of 0 if it has none.

    Args:
        task: The task.
        b: The list.
        state: Of `begin_list`.
        loss: Of the list.

    Returns:
        1 for a list that counts, 0 for one that does not, NaN for one with scores that are not finite; and the loss.
    """
    write(task.losses, b, np.float32(loss))
    write(task.counted, b, np.uint8(1 if state > 0 else 0))
    if state != 1 and task.gradient != 0:
        clear(task.gradient + 4 * b * task.items, task.items)
    return np.nan if state < 0 else np.float64(state > 0), loss


@inlined
def clear(address: Any, n: Any) -> None:
    """Write n float32 zeros."""
    for i in range(0, n, WIDTH):
        store_where(address, i, splat(np.float32(0.0)), places(np.int32(i)) < np.int32(n))


def over_lists(one_list: Callable[[Any, Any, Any], Any]) -> native:
    """Make a kernel from a function of one list. The kernel runs as one of the threads of a task.

    Args:
        one_list: An inlined function of the task, the number of a list and the buffer of the thread. Returns two
            numbers; `recsys_topk.ops.task.run` returns their sums over the lists.
    """

    def kernel(address: Any) -> None:
        task, buffer = task_at(address), buffer_of(address)
        while True:
            part, first, last = take(address)
            if part < 0:
                break
            counted, whole = 0.0, 0.0
            for b in range(first, last):
                number, loss = one_list(task, b, buffer)
                counted += number
                whole += loss
            write(task.results, 2 * part, counted)
            write(task.results, 2 * part + 1, whole)

    # The name of the file on disk that keeps the machine code.
    kernel.__name__ = kernel.__qualname__ = f"{one_list.__name__}s"
    return native(kernel)
