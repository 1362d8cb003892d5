"""Run a compiled loop over the lists of a batch, on the threads of torch."""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.backends.machine_code import Kernel
from recsys_topk.ops.backends.parallel import run_team

# Number of floats in a vector of the loops. Buffers for a list are padded to a multiple of it.
WIDTH = 16

# With fewer items than this, one thread is faster than several.
ALONE = 1 << 13

# Lists are divided into at most this many parts for any number of threads, so that sums do not depend on the threads.
PARTS = 16

DFTOPK, LOGISTIC, LAPLACE, CLIP, FENCHEL_YOUNG = 0, 1, 2, 3, 4  # codes of the laws

# Rows of the buffer of the joint objective per stage. One more row holds the signs of the items, and one their weights.
STAGE_ROWS = 6

# A thread keeps buffers of at most this many bytes for the next call.
KEPT = 64 << 20


class Task(NamedTuple):
    """The arguments of a loop. Addresses are those of contiguous arrays, which must exist until the call returns.

    Attributes:
        lists: B.
        items: N.
        scores: Address of (B, N) float32. For the joint objective: of an array with one such address per stage.
        labels: Address of (B, N) float32.
        mask: Address of (B, N) bool; 0 = all items are valid.
        weights: Address of (B, N) float32, the weights of the items; read by the kernels of lists with weights.
        ks: Address of (B,) float64, one k per list; 0 = all lists have the same `k`.
        k: Number of items to select; -1 = the number of positives of each list.
        stages: Number of stages M of the joint objective.
        quotas: Address of (M,) int64, the number of items that each stage keeps; 0 = all stages keep k.
        losses: Address of (B,) float32 for the losses, with 0 for skipped lists. For the joint objective (M + 1, B):
            one row per stage, then the survival term.
        counted: Address of (B,) bool for whether a list counts. For the joint objective (M + 1, B).
        gradient: Address of (B, N) float32 for the gradient; 0 = no gradient. For the joint objective (M, B, N): the
            gradients of the stage terms.
        joint_gradient: Address of (M, B, N) float32 for the gradient of the survival term.
        above: Items with a label above this are positive.
        tau: Temperature.
        alpha: Parameter of the dftopk law.
        others: Weight of the items that are not true in the mean; read by the kernels of losses of weighted lists.
        scale: Factor of the gradients.
    """

    lists: int
    items: int
    scores: int
    labels: int
    mask: int
    weights: int
    ks: int
    k: int
    stages: int
    quotas: int
    losses: int
    counted: int
    gradient: int
    joint_gradient: int
    above: float
    tau: float
    alpha: float
    others: float
    scale: float


def address_of(x: Tensor | None) -> int:
    """Return the address of the values of a contiguous tensor; 0 for None."""
    return 0 if x is None else x.data_ptr()


# Fields that `run` puts before those of the task: the number of parts that were taken, the number of threads that have
# started, the number of parts, the items rounded up to a multiple of WIDTH, the address of the buffers, the size of one
# buffer, and the address of the results.
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
    """Memory of one Python thread for a task, its results and its buffers."""

    def __init__(self) -> None:
        self.record = memoryview(b"")
        self.address = 0

    def grow(self, size: int) -> None:
        whole = np.zeros(size + 64, np.uint8)
        skipped = -whole.ctypes.data % 64  # vectors that cross cache lines are slower
        self.record = whole[skipped : skipped + size].data
        self.address = whole.ctypes.data + skipped


_memory = _Memory()


def run(kernel: Kernel, task: Task, rows: int) -> tuple[float, float]:
    """Run a loop over the lists of a task, on as many threads as torch uses.

    Args:
        kernel: The loop over the lists of a task.
        task: The task.
        rows: Number of rows of the buffer of the loop. A row holds a padded list of float32.

    Returns:
        The number of lists that count and the sum of their losses; NaN if a score or its square is not finite.
    """
    lists, items = task[:2]
    parts = min(lists, PARTS)
    threads = 1 if lists * items < ALONE else min(torch.get_num_threads(), parts)
    size = -(-items // WIDTH) * WIDTH
    buffer = 4 * rows * size
    memory, needed = _memory, _BUFFERS + threads * buffer
    if len(memory.record) < needed:
        memory = _memory if needed <= KEPT else _Memory()
        memory.grow(needed)
    record, start = memory.record, memory.address
    _RECORD.pack_into(record, 0, 0, 0, parts, size, start + _BUFFERS, buffer, start + _RESULTS, *task)
    run_team(kernel.address, start, threads)
    sums = _SUMS.unpack_from(record, _RESULTS)
    return sum(sums[0 : 2 * parts : 2]), sum(sums[1 : 2 * parts : 2])
