"""How a kernel reads its task, takes parts of it and writes results. See `recsys_topk.ops.backends.task`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types

from recsys_topk.ops.backends.compiled.build import inlined, native
from recsys_topk.ops.backends.compiled.lanes import intrinsic, places, splat
from recsys_topk.ops.backends.compiled.memory import claim, store_where, write
from recsys_topk.ops.backends.task import TASK, WIDTH

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
    """Return the address of a new buffer. Each thread calls this once."""
    task = task_at(address)
    return task.buffers + claim(address + WORKERS) * task.buffer


@inlined
def take(address: Any) -> Any:
    """Return a part that no thread has taken, its first list and the end of its lists; (-1, 0, 0) if none is left."""
    task = task_at(address)
    part = claim(address + NEXT)
    if part >= task.parts:
        return -1, 0, 0
    return part, part * task.lists // task.parts, (part + 1) * task.lists // task.parts


@inlined
def clear(address: Any, n: Any) -> None:
    """Write n float32 zeros."""
    for i in range(0, n, WIDTH):
        store_where(address, i, splat(np.float32(0.0)), places(np.int32(i)) < np.int32(n))


def list_kernel(one_list: Callable[[Any, Any, Any], Any]) -> native:
    """Make a kernel from a function of one list. Every thread of a task runs the kernel.

    Args:
        one_list: An inlined function of the task, the index of a list and the buffer of the thread. It returns two
            numbers, and `recsys_topk.ops.backends.task.run` returns their sums over the lists.
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

    # Part of the name of the file in the cache.
    kernel.__name__ = kernel.__qualname__ = f"{one_list.__name__}_kernel"
    return native(kernel)
