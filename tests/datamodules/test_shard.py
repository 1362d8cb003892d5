"""Shards of tensors in memory, catalogues with values, and the batches of loaders."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from in_memory import InMemory

from recsys_topk.datamodules import CascadeBatch, Catalogue, ShardBatch, ShardLoader, TensorShard, expand

LISTS = torch.tensor([[3, 0, -1], [-1, -1, -1], [1, 3, 2]])


def catalogue(values: int = 2) -> Catalogue:
    ids = torch.tensor([10, 20, 30, 40, 50])
    return Catalogue(ids, ids[:, None] // 10, values=torch.arange(5.0 * values).view(5, values))


def shard(lists: torch.Tensor = LISTS, **options: Any) -> TensorShard:
    return TensorShard("day", catalogue(), torch.tensor([7, 8, 9]), lists, torch.ones(lists.shape), **options)


def test_batch_of_a_tensor_shard_equals_values_by_hand() -> None:
    batch = shard().batch(np.array([2, 0]))
    assert batch.request_id.tolist() == [9, 7]
    assert batch.item_id.tolist() == [10, 20, 30, 40]
    assert batch.items.tolist() == [[1], [2], [3], [4]]
    assert batch.item_values.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert batch.candidates.tolist() == [[1, 3, 2], [3, 0, 0]]
    assert batch.mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.labels.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.group.tolist() == [[0, 0, 0], [0, 0, -1]]
    assert batch.request.shape == (2, 0)
    assert batch.history.shape == (2, 0, 0)
    assert batch.request_values.shape == (0, 0)


def test_batch_of_empty_lists_has_a_pool() -> None:
    batch = shard().batch(np.array([1]))
    assert batch.item_id.numel() == 1
    assert not batch.mask.any()
    assert batch.candidates.eq(0).all()


@pytest.mark.parametrize("source", ["uniform", "popularity"])
def test_negatives_have_the_values_of_their_items(source: Any) -> None:
    before = shard().batch(np.array([0, 2])).plain()
    after = expand(before, 2, seed=0, group=1, source=source, catalogue=catalogue()).batch
    assert after.item_id.numel() > before.item_id.numel()
    rows = after.item_id // 10 - 1
    assert torch.equal(after.item_values, catalogue().values[rows])
    assert torch.equal(after.items, catalogue().features[rows])


def test_to_moves_every_tensor_of_a_batch() -> None:
    batch = shard(request_values=torch.ones(3, 2)).batch(np.array([0, 2]))
    moved = batch.to("meta")
    tensors = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), torch.Tensor)]
    assert {"pool_rows", "item_values", "request_values"} <= set(tensors)
    assert all(getattr(moved, name).device.type == "meta" for name in tensors)


def test_loader_accepts_plain_batches_of_any_shard() -> None:
    class Plain(TensorShard):
        """A shard that returns plain batches."""

        def batch(self, rows: Any) -> CascadeBatch:  # type: ignore[override]
            return super().batch(rows).plain()

    data = InMemory(requests=20)
    whole = data.open_shard("train")
    plain = Plain.__new__(Plain)
    plain.__dict__.update(whole.__dict__)
    for a, b in zip(ShardLoader([whole], 8), ShardLoader([plain], 8), strict=True):
        assert type(b) is ShardBatch
        assert b.pool_rows is None
        assert (a.shard, a.training) == (b.shard, b.training) == ("train", False)
        left, right = data.add_negatives(a), data.add_negatives(b)
        assert torch.equal(left.item_id[left.candidates], right.item_id[right.candidates])


def test_shards_are_shuffled_differently() -> None:
    data = InMemory(requests=30)
    loader = data.train_dataloader()
    (first,) = [[i for batch in loader for i in batch.request_id.tolist()]]
    assert sorted(first) == list(range(30))
    assert first != sorted(first)
    assert data.open_shard("train").order_key != data.open_shard("val").order_key


def test_invalid_lists_and_catalogues_raise() -> None:
    with pytest.raises(ValueError, match=r"lists of shard 'day' must hold catalogue rows 0\.\.4 or -1 .* got -1\.\.5"):
        shard(torch.tensor([[5, 0], [1, 1], [-1, 0]]))
    with pytest.raises(ValueError, match="shard 'day' has 3 request ids and 2 rows of request"):
        shard(request=torch.ones(2, 1, dtype=torch.int64))
    ids = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="must be ascending"):
        Catalogue(ids.flip(0), ids[:, None])
    with pytest.raises(ValueError, match=r"item ids must be in 0\.\.2\^40-1, got -1\.\.2"):
        Catalogue(torch.tensor([-1, 2]), ids[:, None])
    with pytest.raises(ValueError, match="2 item ids and 3 rows of values"):
        Catalogue(ids, ids[:, None], values=torch.ones(3, 1))
