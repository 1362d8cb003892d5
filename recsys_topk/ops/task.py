"""A batch of lists as the compiled loops take it, and how its lists are divided among threads."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol, get_type_hints

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.parallel import at_once

# Floats of a vector of the loops; lists are padded to a multiple of it.
WIDTH = 16

# Items below which waking another thread takes longer than the loop.
ALONE = 1 << 13

# Lists are taken by threads in at most this many parts, whatever their number, so that sums do not depend on it.
PARTS = 16

# Bytes up to which a thread keeps its buffers for the next call.
KEPT = 64 << 20


class Kernel(Protocol):
    """A loop over the lists of a task, compiled to a C function of the address of the task."""

    @property
    def address(self) -> int:
        """Where the machine code is."""


class Task(NamedTuple):
    """What a loop is told. Addresses are those of contiguous arrays, which must outlive the call.

    Attributes:
        lists: B.
        items: N.
        scores: Address of (B, N) float32; of the joint objective, of one such address per stage.
        labels: Address of (B, N) float32.
        mask: Address of (B, N) bool; 0 = all items are real.
        ks: Address of (B,) int64; 0 = `k` is the k of all.
        k: -1 = each list's number of positives.
        stages: Number of stages M of the joint objective.
        quotas: Address of (M,) int64, where each stage cuts; 0 = at k.
        losses: Address of (B,) float32, written, with 0 for lists that do not count; of the joint objective (M + 1, B),
            survival last.
        counted: Address of (B,) bool, written; of the joint objective (M + 1, B).
        gradient: Address of (B, N) float32, written; 0 = not wanted. Of the joint objective (M, B, N): of the losses of
            the stages.
        joint_gradient: Address of (M, B, N) float32, written: of the loss of survival.
        law: Its code.
        above: Items with a label above this are positive.
        tau: Temperature.
        alpha: Of the dftopk law.
        scale: What gradients are multiplied by.
    """

    lists: int
    items: int
    scores: int
    labels: int
    mask: int
    ks: int
    k: int
    stages: int
    quotas: int
    losses: int
    counted: int
    gradient: int
    joint_gradient: int
    law: int
    above: float
    tau: float
    alpha: float
    scale: float


def address_of(x: Tensor | None) -> int:
    """Return where the numbers of a contiguous tensor are; 0 for none."""
    return 0 if x is None else x.data_ptr()


# What `run` adds in front: the first part that no thread has taken, the number of threads that have begun, the number
# of parts, the items rounded up to a multiple of WIDTH, and the addresses and the size of the buffers and the results.
ADDED = ("next", "workers", "parts", "size", "buffers", "buffer", "results")
TASK = np.dtype(
    [(name, np.int64) for name in ADDED]
    + [(name, np.float32 if kind is float else np.int64) for name, kind in get_type_hints(Task).items()]
)
_RECORD = struct.Struct(
    "=" + "".join("f" if field == np.float32 else "q" for field, *_ in (TASK.fields or {}).values())
)
_SUMS = struct.Struct(f"={2 * PARTS}d")
_RESULTS = 256  # bytes before the results
_BUFFERS = _RESULTS + _SUMS.size  # bytes before the buffers


class _Memory(threading.local):
    """Memory of a thread for a task, its results and its buffers."""

    def __init__(self) -> None:
        self.record = memoryview(b"")
        self.address = 0

    def grow(self, size: int) -> None:
        whole = np.zeros(size + 64, np.uint8)
        skipped = -whole.ctypes.data % 64  # vectors that cross lines of the cache take longer
        self.record = whole[skipped : skipped + size].data
        self.address = whole.ctypes.data + skipped


_memory = _Memory()


def run(kernel: Kernel, task: Task, rows: int) -> tuple[float, float]:
    """Run a loop over the lists of a task, on as many threads as torch has.

    Args:
        kernel: The loop.
        task: The task.
        rows: Number of float32 arrays of the length of a padded list that the loop needs as a buffer.

    Returns:
        The number of lists that count and the sum of their losses; NaN if a score is not finite, or its square.
    """
    lists, items = task[:2]
    parts = min(lists, PARTS)
    threads = 1 if _forked or lists * items < ALONE else min(torch.get_num_threads(), parts)
    size = -(-items // WIDTH) * WIDTH
    buffer = 4 * rows * size
    memory, needed = _memory, _BUFFERS + threads * buffer
    if len(memory.record) < needed:
        memory = _memory if needed <= KEPT else _Memory()
        memory.grow(needed)
    record, start = memory.record, memory.address
    _RECORD.pack_into(record, 0, 0, 0, parts, size, start + _BUFFERS, buffer, start + _RESULTS, *task)
    if threads == 1:
        _function(kernel.address)(start)
    else:
        _fork(kernel.address, start, threads)
    sums = _SUMS.unpack_from(record, _RESULTS)
    return sum(sums[0 : 2 * parts : 2]), sum(sums[1 : 2 * parts : 2])


@cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


def _fork(code: int, task: int, threads: int) -> None:
    """Call the C function at `code` on some threads at once; they take parts of the task until none is left."""
    team = _team()
    if team is None:
        at_once(lambda _: _function(code)(task), range(threads))
    else:
        team(code, task, threads, 0)


@cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """Return the function with which torch starts a parallel region; None if torch was built with another library.

    Its threads wait actively for the next region, which then begins within 2 microseconds. A thread of Python takes 50
    to begin beside them, as long as the loop.
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
    _forked = True  # the threads of the team do not live on in a forked process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
