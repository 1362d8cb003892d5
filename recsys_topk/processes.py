"""Several processes that train on one batch: what is counted, is counted over all of them.

Data parallelism averages gradients over processes. A mean over the lists of one process therefore weighs the lists of a
process with few of them more than those of a process with many. Inside `one_batch`, every mean over lists divides by
the number of lists per process, averaged over the processes: the average of the gradients is then the gradient of the
mean over all lists, and the average of the values is that mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_together = False


@contextmanager
def one_batch(active: bool = True) -> Iterator[None]:
    """Take the batches of all processes for one batch inside; every process must do the same things in it.

    Args:
        active: Whether to do so; otherwise, and without other processes, nothing changes.
    """
    global _together
    there = active and dist.is_available() and dist.is_initialized()
    before, _together = _together, there and dist.get_world_size() > 1
    try:
        yield
    finally:
        _together = before


def processes() -> int:
    """Return how many processes share the batch: 1 outside of `one_batch`."""
    return dist.get_world_size() if _together else 1


def divisor(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mean divides by: a count averaged over the processes, and 1 where there is nothing.

    Args:
        count: Number or weight of the lists of this process; any shape.
        dtype: Of the result.

    Example:
        >>> divisor(torch.tensor([3, 0]), torch.float32)
        tensor([3., 1.])
    """
    if _together:
        count = count.detach().double()
        count = total(count) / processes()
    count = count.to(dtype)
    return torch.where(count > 0, count, 1.0)


def divisors(counts: Sequence[int]) -> list[float]:
    """Return `divisor` of counts that are known on the host.

    Example:
        >>> divisors([3, 0])
        [3.0, 1.0]
    """
    if not _together:
        return [float(max(count, 1)) for count in counts]
    found: list[float] = divisor(torch.tensor(counts, dtype=torch.float64), torch.float64).tolist()
    return found


def total(x: Tensor) -> Tensor:
    """Return the sum of `x` over the processes, differentiable; `x` itself if there is one."""
    if not _together:
        return x
    summed: Tensor = _Total.apply(x)  # type: ignore[no-untyped-call]
    return summed


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient


def largest(x: Tensor) -> Tensor:
    """Return the maximum of `x` over the processes, element by element."""
    if not _together:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def average(x: Tensor) -> Tensor:
    """Return the mean of `x` over the processes, without gradient."""
    return total(x.detach()) / processes() if _together else x.detach()
