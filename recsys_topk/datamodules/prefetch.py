"""Copy the next batch to the device during the computation on the current batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from recsys_topk.datamodules.batch import CascadeBatch

Batch = TypeVar("Batch", bound=CascadeBatch)


class Copier(Protocol):
    """Copies batches to a device asynchronously."""

    def start(self, batch: Batch) -> Batch:
        """Start the copy of a batch and return the copy without waiting."""

    def finish(self, batch: CascadeBatch) -> None:
        """Make the computation wait until the copy is complete."""


class StreamCopier:
    """Copies from pinned memory on a separate CUDA stream. Not tested on a GPU.

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
        """See `Copier.finish`. The memory is not reused before the computation is finished."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        batch.record_stream(current)


def copier_for(device: torch.device | None) -> Copier | None:
    """Return the copier for a device; None if no copy is needed, e.g. on a CPU."""
    return StreamCopier(device) if device is not None and device.type == "cuda" else None


def prefetched(batches: Iterable[Batch], copier: Copier | None) -> Iterator[Batch]:
    """Yield batches on the device. When a batch is returned, the copy of the next one has started.

    Args:
        batches: Batches in host memory.
        copier: Copies the batches; None = yield them unchanged.
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
