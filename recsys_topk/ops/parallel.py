"""How loops that do not hold the GIL are run on all cores, and what they are told of indices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch
from torch import Tensor


def over_lists(run: Callable[[int, int, int], Any], size: int) -> None:
    """Call `run(part, first, last)` for parts of `size` lists at once, as many as torch has threads.

    Args:
        run: Works on lists first <= b < last without holding the GIL; `part` counts the calls from 0.
        size: Number of lists.
    """
    parts = number_of_parts(size)
    bounds = [size * part // parts for part in range(parts + 1)]
    at_once(lambda part: run(part, bounds[part], bounds[part + 1]), range(parts))


def at_once(work: Callable[[Any], Any], tasks: Sequence[Any]) -> None:
    """Do all tasks, as many at a time as torch has threads; `work` should not hold the GIL."""
    threads = min(torch.get_num_threads(), len(tasks))
    if threads <= 1:
        for task in tasks:
            work(task)
        return
    waiting = [_pool(threads - 1).submit(work, task) for task in tasks[1:]]
    try:
        work(tasks[0])
    finally:
        wait(waiting)
    for done in waiting:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a forked process


def number_of_parts(size: int) -> int:
    """Return how many parts `over_lists` makes."""
    return max(1, min(torch.get_num_threads(), size))


def add_up(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension; the only part is not copied."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def checked(indices: Tensor, size: int, what: str) -> Tensor:
    """Return `indices` as the loops want them, which trust them; raise IndexError unless all are in [0, size)."""
    if indices.numel():
        low, high = (int(x) for x in indices.aminmax())
        if low < 0 or high >= size:
            raise IndexError(f"{what} must be at least 0 and below {size}, got values from {low} to {high}")
    return indices.long().contiguous()
