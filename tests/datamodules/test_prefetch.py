"""The order of copies and computation, with a copier that records its calls. Copies to a GPU are not tested."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.prefetch import copier_for, prefetched
from tests.cascades.batches import random_batch, recflow_like_schema


class RecordingCopier:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, batch: CascadeBatch) -> CascadeBatch:
        self.lines.append(f"start {int(batch.request_id[0])}")
        return batch.replace()

    def finish(self, batch: CascadeBatch) -> None:
        self.lines.append(f"finish {int(batch.request_id[0])}")


def batches(number: int) -> list[CascadeBatch]:
    made = random_batch(recflow_like_schema(), size=2)
    return [made.replace(request_id=torch.tensor([i, i])) for i in range(number)]


def test_next_copy_starts_before_a_batch_is_used() -> None:
    copier = RecordingCopier()
    for batch in prefetched(batches(3), copier):
        copier.lines.append(f"use {int(batch.request_id[0])}")
    assert copier.lines == [
        "start 0", "start 1", "finish 0", "use 0", "start 2", "finish 1", "use 1", "finish 2", "use 2",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
def test_zero_or_one_batch(number: int) -> None:
    assert len(list(prefetched(batches(number), RecordingCopier()))) == number


def test_batches_on_a_cpu_are_not_copied() -> None:
    assert copier_for(torch.device("cpu")) is None
    given = batches(2)
    assert all(a is b for a, b in zip(prefetched(given, None), given, strict=True))


def test_every_tensor_is_recorded_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: seen.append(id(tensor)))
    batch = batches(1)[0]
    batch.record_stream(SimpleNamespace())
    tensors = [value for field in fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)]
    assert seen == [id(tensor) for tensor in tensors]
