"""Whether compiled loops can be used, and how they are run on all cores."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

SWITCH = "RECSYS_TOPK_COMPILED"


def kernels(*tensors: Tensor) -> bool:
    """Return whether the compiled loops can serve these tensors; if not, the caller uses torch alone.

    It serves plain float32 tensors on a CPU, outside of tracing, where numba is installed (`recsys-topk[fast]`) and the
    environment variable RECSYS_TOPK_COMPILED is not 0.
    """
    if os.environ.get(SWITCH) == "0" or torch.compiler.is_compiling():
        return False
    if any(x.device.type != "cpu" or x.dtype != torch.float32 or type(x.detach()) is not Tensor for x in tensors):
        return False
    return _load()


@cache
def _load() -> bool:
    return importlib.util.find_spec("numba") is not None


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
    with ThreadPoolExecutor(threads) as pool:  # made for each call, so that no threads are left behind in a fork
        list(pool.map(work, tasks))


def number_of_parts(size: int) -> int:
    """Return how many parts `over_lists` makes."""
    return max(1, min(torch.get_num_threads(), size))


def checked(indices: Tensor, size: int, what: str) -> Tensor:
    """Return `indices` as the loops want them, which trust them; raise IndexError unless all are in [0, size)."""
    if indices.numel():
        low, high = (int(x) for x in indices.aminmax())
        if low < 0 or high >= size:
            raise IndexError(f"{what} must be at least 0 and below {size}, got values from {low} to {high}")
    return indices.long().contiguous()
