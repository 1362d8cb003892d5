"""How the benchmarks measure: interleaved medians of CPU time, two-thread wall time, memory in a fresh process."""

from __future__ import annotations

import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
T_number = TypeVar("T_number", int, float)
Pass = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Number of lists, items per list, and k.

    Example:
        >>> Shape.parse("1024x200x10"), str(Shape(1, 50, 25))
        (Shape(lists=1024, items=200, k=10), '1x50x25')
    """

    lists: int
    items: int
    k: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``LISTSxITEMSxK``."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ValueError(f"a shape is LISTSxITEMSxK, e.g. 1024x200x10, got {text!r}")
        shape = cls(*(int(part) for part in parts))
        if not 0 < shape.k < shape.items or shape.lists < 1:
            raise ValueError(f"a shape needs lists >= 1 and 0 < k < items, got {text!r}")
        return shape

    def __str__(self) -> str:
        return f"{self.lists}x{self.items}x{self.k}"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def elapsed(call: Pass, clock: Callable[[], T_number]) -> T_number:
    """Return what a clock shows more after a call than before it."""
    before = clock()
    call()
    return clock() - before


def interleaved(method: Pass, baseline: Pass, seconds: float, clock: Callable[[], int]) -> tuple[float, float]:
    """Return the medians of `method` and `baseline` in milliseconds, run in turns for about `seconds`.

    In turns, so that whatever slows the machine down slows both; medians, because interruptions only add.
    """
    start = time.monotonic()
    method()
    least = 3 if time.monotonic() - start < seconds else 1  # what takes longer than its time is measured once
    baseline()
    times: tuple[list[int], list[int]] = ([], [])
    deadline = time.monotonic() + seconds
    while len(times[0]) < least or (time.monotonic() < deadline and len(times[0]) < 2000):
        for one, kept in zip((method, baseline), times, strict=True):
            kept.append(elapsed(one, clock))
    return statistics.median(times[0]) / 1e6, statistics.median(times[1]) / 1e6


cpu_clock = time.process_time_ns


def cuda_clock() -> int:
    """Wall time after all queued work of the GPU is done, in nanoseconds."""
    torch.cuda.synchronize()
    return time.perf_counter_ns()


def clock_of(device: str) -> Callable[[], int]:
    """Return the clock for a device; raise if there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; leave --device out to use the CPU")
    return cuda_clock if device == "cuda" else cpu_clock


def growth_exponent(sizes: list[int], milliseconds: list[float]) -> float:
    """Return the slope of the least-squares line through log time over log size.

    Example:
        >>> round(growth_exponent([10, 100, 1000], [1.0, 10.0, 100.0]), 3)
        1.0
    """
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, milliseconds)]).slope


def peak_memory() -> float:
    """Return the peak resident memory of this program, in MB.

    `getrusage` would count what the process was before it became this program, a copy of its parent.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def peak_growth(warm_up: Pass, method: Pass) -> float:
    """Return by how many MB `method` raises the peak resident memory of this process above its peak so far."""
    warm_up()
    before = peak_memory()
    method()
    return peak_memory() - before


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """Return what `function` returns in a fresh process, whose peak memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
