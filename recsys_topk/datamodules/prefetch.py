"""The next batch on its way to the device while the current one is computed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from recsys_topk.datamodules.batch import CascadeBatch

Batch = TypeVar("Batch", bound=CascadeBatch)


class Copier(Protocol):
    """Copies batches to a device behind the back of the computation."""

    def start(self, batch: Batch) -> Batch:
        """Begin a copy and return it at once."""

    def finish(self, batch: CascadeBatch) -> None:
        """Make the computation wait for a copy before it reads it."""


class StreamCopier:
    """Copies on a CUDA stream of its own, from pinned memory. Not run: no GPU was at hand.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Batch) -> Batch:
        """See `Copier.start`."""
        with torch.cuda.stream(self._stream):
            return batch.to(self._device, non_blocking=True)

    def finish(self, batch: CascadeBatch) -> None:
        """See `Copier.finish`; the memory is not reused before the computation is done with it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        batch.record_stream(current)


def copier_for(device: torch.device | None) -> Copier | None:
    """Return what copies to a device; None if there is nothing to copy, as on a CPU."""
    return StreamCopier(device) if device is not None and device.type == "cuda" else None


def prefetched(batches: Iterable[Batch], copier: Copier | None) -> Iterator[Batch]:
    """Yield batches on the device; the copy of the next one has begun when a batch is returned.

    Args:
        batches: Batches in host memory.
        copier: Copies them; None = they are returned as they are.
    """
    if copier is None:
        yield from batches
        return
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        return
    ready = copier.start(first)
    for batch in stream:
        following = copier.start(batch)
        copier.finish(ready)
        yield ready
        ready = following
    copier.finish(ready)
    yield ready
