"""Run compiled loops on the threads of torch."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.machine_code import Kernel

_take_chains = Kernel("recsys_topk.ops.backends.entry:take_chains")


class Call(NamedTuple):
    """A call of a loop.

    Attributes:
        loop: The loop. Its result is ignored.
        arguments: Contiguous numpy arrays, int and float. The loop gets a contiguous tensor as its address, and None as
            0. A float becomes a float32.
    """

    loop: Loop
    arguments: tuple[Any, ...]


def run_parts(loop: Loop, size: int, *arguments: Any) -> None:
    """Divide lists into `number_of_parts(size)` parts and call the loop once for each part, on all threads.

    Args:
        loop: Called as ``loop(part, first, last, *arguments)``; processes the lists first <= b < last.
        size: Number of lists.
        arguments: Further arguments, see `Call`.
    """
    run_chains([[Call(loop, (*bounds, *arguments))] for bounds in _parts(size)])


def run_chains(chains: Sequence[Sequence[Call]]) -> None:
    """Run all calls on as many threads as torch has. The calls of one chain run in order, on one thread.

    Put the longest chains first, so that no thread waits for the last one.
    """
    packed: dict[int, tuple[str, bytes]] = {}  # by id, as most arguments are part of several calls
    kept = []  # owns the memory of the calls
    first = []
    for chain in chains:
        following = 0
        for call in reversed(chain):
            for x in call.arguments:
                if id(x) not in packed:
                    packed[id(x)] = _pack(x)
            kinds, values = zip(*[packed[id(x)] for x in call.arguments], strict=True)
            head = struct.pack("2q", call.loop.address(kinds), following)
            kept.append(ctypes.create_string_buffer(head + b"".join(values)))
            following = ctypes.addressof(kept[-1])
        first.append(following)
    record = (ctypes.c_int64 * (len(first) + 2))(0, len(first), *first)
    run_team(_take_chains.address, ctypes.addressof(record), min(torch.get_num_threads(), len(first)))


def _pack(x: Any) -> tuple[str, bytes]:
    """Return an argument as `recsys_topk.ops.backends.entry.entry_code` describes it: its kind and its memory."""
    if x is None or isinstance(x, Tensor):
        if x is not None and not x.is_contiguous():
            raise ValueError(f"tensors must be contiguous, got shape {tuple(x.shape)} with strides {x.stride()}")
        return "q", struct.pack("q", 0 if x is None else x.data_ptr())
    if not isinstance(x, np.ndarray):
        return ("f", struct.pack("f4x", x)) if isinstance(x, (float, np.float32)) else ("q", struct.pack("q", x))
    if not x.flags.c_contiguous:
        raise ValueError(f"arrays must be contiguous, got shape {x.shape} with strides {x.strides}")
    fields = (0, 0, x.size, x.itemsize, x.ctypes.data, *x.shape, *x.strides)
    return f"{x.dtype.char}{x.ndim}", struct.pack(f"{len(fields)}q", *fields)


def run_team(code: int, address: int, threads: int) -> None:
    """Call the C function at `code` with an address, on several threads of torch at once.

    Args:
        code: A C function of one int64. Each thread takes parts of the work until none is left.
        address: Its argument.
        threads: Number of threads. After a fork it runs on one, as the threads of torch exist in the parent only.
    """
    function, team = _function(code), _team()
    if threads <= 1 or _forked:
        function(address)
    elif team is None:
        run_threads(lambda _: function(address), range(threads))
    else:
        team(code, address, threads, 0)


@cache
def _function(code: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(code)


@cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """Return the function that starts a parallel region of torch; None if torch does not use GNU OpenMP.

    The threads of torch spin while they wait for the next region, which then starts within 2 microseconds. A Python
    thread would compete with them for a core.
    """
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", 0))
    except OSError:
        return None
    start: Any = library.GOMP_parallel
    start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    found: Callable[[int, int, int, int], None] = start
    return found


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_threads(work: Callable[[Any], Any], tasks: Iterable[Any]) -> None:
    """Call `work` for all tasks, in as many Python threads as torch has threads."""
    tasks = list(tasks)
    threads = min(torch.get_num_threads(), len(tasks))
    if threads <= 1:
        for task in tasks:
            work(task)
        return
    remaining = iter(tasks)

    def take() -> None:
        for task in remaining:
            work(task)

    with ThreadPoolExecutor(threads - 1) as pool:  # made for each call: threads do not survive a fork
        others = [pool.submit(take) for _ in range(threads - 1)]
        take()
    for other in others:
        other.result()


def number_of_parts(size: int) -> int:
    """Return the number of parts into which `run_parts` divides `size` lists."""
    return max(1, min(torch.get_num_threads(), size))


def _parts(size: int) -> list[tuple[int, int, int]]:
    """Return number, first list and last list (exclusive) of each part."""
    parts = number_of_parts(size)
    return [(part, size * part // parts, size * (part + 1) // parts) for part in range(parts)]


def add_up(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension, without a copy if its size is 1."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def checked(indices: Tensor, size: int, what: str) -> Tensor:
    """Return indices as contiguous int64. Raise IndexError unless all are in [0, size); the loops do not check them."""
    if indices.numel():
        low, high = (int(x) for x in indices.aminmax())
        if low < 0 or high >= size:
            raise IndexError(f"{what} must be at least 0 and below {size}, got values from {low} to {high}")
    return indices.long().contiguous()
