"""Tables that grow: old rows and optimizer states stay bit-equal, and training goes on."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recsys_topk.cascades.growth import grow_tables
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.tabular.schema import Schema
from tests.cascades.batches import random_batch, recflow_like_schema

TABLE = "video_id"
SCHEMA = recflow_like_schema(users=10, items=30)


def longer(schema: Schema, more: int) -> Schema:
    tables = tuple(replace(one, rows=one.rows + more * (one.name == TABLE)) for one in schema.tables)
    return replace(schema, tables=tables)


def trained(model: CascadeModule, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for two steps and return the weights and the state of the optimizer, as in a checkpoint."""
    optimizer = model.configure_optimizers()
    if content is not None:
        model.load_state_dict(content["state_dict"])
        optimizer.load_state_dict(content["optimizer_states"][0])
        unchanged = optimizer.state_dict()
        assert_equal(content["optimizer_states"][0], unchanged)
    for seed in range(2):
        optimizer.zero_grad()
        model.compute_objective(random_batch(model.schema, 8, pool=60, items=30, seed=seed)).total.backward()
        optimizer.step()
    return copy.deepcopy({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]})


def tensors(content: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return {path: content}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {name: one for key, value in items for name, one in tensors(value, f"{path}/{key}").items()}


def assert_equal(one: Any, two: Any) -> None:
    left, right = tensors(one), tensors(two)
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("embedding_optimizer", ["same", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("tied", [True, False])
def test_old_rows_and_states_are_bit_equal_and_new_ones_start_as_unknown(embedding_optimizer: str, tied: bool) -> None:
    options: dict[str, Any] = {"embedding_optimizer": embedding_optimizer, "tie_history": tied, "loss": "softmax"}
    rows = SCHEMA.table(TABLE).rows
    new = np.array([4, *range(rows, rows + 3)])  # an evicted row that is used again, and three at the end
    content = trained(CascadeModule(SCHEMA, **options))
    before = copy.deepcopy(content)
    model = CascadeModule(longer(SCHEMA, 3), **options)
    grow_tables(content, model, {TABLE: new})
    old, now = tensors(before), tensors(content)
    assert list(old) == list(now)
    changed = [name for name in old if old[name].shape != now[name].shape]
    weights = [name for name in changed if name.startswith("/state_dict")]
    assert len(weights) == (2 if tied else 4)  # two stages
    assert len(changed) - len(weights) == len(weights) * (2 if embedding_optimizer == "same" else 1)
    kept = np.setdiff1d(np.arange(rows), new)
    for name in changed:
        assert torch.equal(now[name][kept], old[name][kept])
        start = old[name][1].expand_as(now[name][new]) if name in weights else torch.zeros_like(now[name][new])
        assert torch.equal(now[name][new], start)
    assert all(torch.equal(old[name], now[name]) for name in old if name not in changed)
    after = tensors(trained(model, content))  # it loads, and training changes the new rows
    assert any(not torch.equal(after[name][new], now[name][new]) for name in weights)


def test_sharded_tables_are_refused_in_words() -> None:
    model = CascadeModule(SCHEMA)
    for stage in model.cascade.stages.values():
        for name in stage.embedding.collections:
            stage.embedding.collections[name] = torch.nn.Identity()
    with pytest.raises(ValueError, match="a growing vocabulary needs tables on one device, but these are sharded"):
        grow_tables({"state_dict": {}, "optimizer_states": []}, model, {})
