"""Means over the global batch: the batches of all data-parallel processes together.

Data parallelism averages gradients over processes. With a mean over the lists of each process, lists of a process that
has few lists would get a larger weight. Inside `global_batch`, every mean over lists divides by the average number of
lists per process instead. The average of the gradients is then the gradient of the mean over all lists, and the average
of the values is that mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_global = False


@contextmanager
def global_batch(active: bool = True) -> Iterator[None]:
    """Compute means over the batches of all processes inside this context. All processes must run the same code in it.

    The context does nothing in a single process, or if it is not `active`.
    """
    global _global
    distributed = active and dist.is_available() and dist.is_initialized()
    before, _global = _global, distributed and dist.get_world_size() > 1
    try:
        yield
    finally:
        _global = before


def processes() -> int:
    """Return the number of processes that share the batch: 1 outside `global_batch`."""
    return dist.get_world_size() if _global else 1


def divisor(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the divisor of a mean: the count averaged over the processes, or 1 where the count is 0.

    Example:
        >>> divisor(torch.tensor([3, 0]), torch.float32)
        tensor([3., 1.])
    """
    if _global:
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
    if not _global:
        return [float(max(count, 1)) for count in counts]
    found: list[float] = divisor(torch.tensor(counts, dtype=torch.float64), torch.float64).tolist()
    return found


def total(x: Tensor) -> Tensor:
    """Return the sum of `x` over the processes; differentiable. In a single process this is `x` itself."""
    if not _global:
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
    if not _global:
        return x
    x = x.detach().clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def average(x: Tensor) -> Tensor:
    """Return the mean of `x` over the processes, without gradient."""
    return total(x.detach()) / processes() if _global else x.detach()


def sum_over_job(x: Tensor) -> Tensor:
    """Return the sum of `x` over all processes of the job, inside and outside of `global_batch`, without gradient."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        x = x.clone()
        torch.distributed.all_reduce(x)
    return x
