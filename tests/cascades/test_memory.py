"""The planned memory of tables against the allocated memory, and the errors for tables that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_topk.cascades.memory import check_memory, plan_memory
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.optimizers import table_collections
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import table_weights
from recsys_topk.datamodules import RecFlowDataModule
from recsys_topk.datamodules.simulator.simulation import WorldConfig, simulate
from recsys_topk.machine import machine_memory
from recsys_topk.runs import preflight
from recsys_topk.tabular.schema import Feature, Schema, Table
from tests.cascades.batches import random_batch, recflow_like_schema


def tensors(content: Any) -> list[torch.Tensor]:
    """Return all tensors in nested dicts and lists."""
    if isinstance(content, torch.Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "tables", "options"),
    [
        ("adam", "same", {}),
        ("adam", "same", {"amsgrad": True}),
        ("adagrad", "same", {}),
        ("sgd", "same", {"momentum": 0.9}),
        ("sgd", "same", {}),
        ("adam", "rowwise_adagrad", {}),
        ("adam", "adagrad", {}),
        ("adam", "sgd", {}),
    ],
)
def test_plan_equals_allocated_memory(share: bool, optimizer: str, tables: str, options: dict[str, Any]) -> None:
    schema = recflow_like_schema()
    model = CascadeModule(
        schema,
        dim=8,
        share_embeddings=share,
        optimizer=optimizer,
        embedding_optimizer=tables,
        optimizer_options=options,
        lr=0.01,
    )
    made = model.configure_optimizers()
    model.compute_objective(random_batch(schema)).total.backward()
    made.step()
    plan = plan_memory(
        schema, 2, 8, share_embeddings=share, optimizer=optimizer, embedding_optimizer=tables, optimizer_options=options
    )
    weights = {id(w): w for collection in table_collections(model).values() for w in table_weights(collection).values()}
    assert plan.part("weights") == sum(w.nbytes for w in weights.values())
    assert plan.part("gradient") == sum(w.grad.nbytes for w in weights.values() if w.grad is not None)
    if tables == "same":
        state = sum(t.nbytes for w in weights.values() for t in tensors(made.state[w]) if t.numel() > 1)
    else:
        state = sum(t.nbytes for t in tensors(made.state_dict()["fused"]) if t.numel() > 1)
    assert plan.part("optimizer") == state


def large_schema(rows: int = 75_000_002, vocabulary: str | None = None) -> Schema:
    video = (Feature("video_id", "video_id"),)
    table = Table("video_id", rows, vocabulary=vocabulary)
    return Schema((table, Table("user_id", 1000)), (Feature("user_id", "user_id"),), video, video)


def test_recflow_with_adam_raises_and_the_suggested_options_fit() -> None:
    arguments = {"stages": 2, "dim": 8}
    with pytest.raises(
        ValueError, match=r"need 17.9 GB .* but only 8.0 GB are available; the largest table is video_id"
    ) as raised:
        check_memory(large_schema(), 8 * 2**30, arguments)
    message = str(raised.value)
    assert "--model.embedding_optimizer rowwise_adagrad (5.0 GB)" in message
    assert "--data.vocabulary compact --model.embedding_optimizer rowwise_adagrad" in message
    (rows,) = re.findall(r"video_id hash:rows=(\d+)", message)
    room = {**arguments, "embedding_optimizer": "rowwise_adagrad"}
    assert check_memory(large_schema(int(rows)), 8 * 2**30, room).total <= 0.9 * 8 * 2**30
    assert check_memory(large_schema(), 8 * 2**30, room).copies == 2


def test_error_suggests_combining_options_if_none_is_enough() -> None:
    with pytest.raises(ValueError, match="combine options, or shard the tables"):
        check_memory(large_schema(), 2**15, {"stages": 2, "dim": 4})
    with pytest.raises(ValueError, match=r"--model\.dim 4") as raised:
        check_memory(large_schema(vocabulary="a" * 64), 4 * 2**30, {"stages": 2, "dim": 16})
    assert "--data.vocabulary compact" not in str(raised.value)  # the table has a vocabulary already


def test_announcement_is_one_line_for_small_tables_and_a_table_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = preflight.announce_memory(large_schema(1000), 2, {"dim": 8, "k": 10}, "cpu", "auto")
    assert line == "tables of 2 stages: 125 KB weights, 250 KB optimizer, 125 KB gradient"
    lines = preflight.announce_memory(large_schema(10_000_000), 2, {"dim": 8}, "cpu", "auto")
    assert re.search(r"video_id +10,000,000 +8 +305\.2 +610\.4 +305\.2 +2,441\.4", "\n".join(lines))
    monkeypatch.setattr(preflight, "machine_memory", lambda: 2**30)
    with pytest.raises(ValueError, match=r"only 1\.0 GB are available"):
        preflight.announce_memory(large_schema(10_000_000), 2, {"dim": 8}, "cpu", "auto")


def test_machine_memory_is_plausible() -> None:
    found = machine_memory()
    assert found is None or found > 2**28


STAGES = [
    StageConfig("two_tower", "retrieval", 30, {"hidden": [64, 16]}),
    StageConfig("transitions", "ranking", 20, {"successors": 7}),
]


def test_layers_and_counts_are_planned_as_they_are_allocated() -> None:
    schema = recflow_like_schema()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    plan = plan_memory(schema, STAGES, 8, optimizer="sgd")
    assert torch.equal(torch.rand(1), expected)  # the plan draws no random numbers
    model = CascadeModule(schema, STAGES, loss="softmax")
    tables = {id(w) for part in table_collections(model).values() for w in table_weights(part).values()}
    assert plan.layers == sum(one.nbytes for one in model.parameters() if id(one) not in tables)
    assert plan.counts == sum(one.nbytes for one in model.cascade.buffers())
    assert plan.counts >= 8 * 7 * min(table.rows for table in schema.tables)
    assert plan.total == plan_memory(schema, 2, 8, optimizer="sgd").total + 2 * plan.layers + plan.counts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 100_000_000}, "embedding dimensions must be at most 65536 and at least 1, got {'default': 100000000}"),
        ({"stages": [StageConfig("mlp", "a", 9, {"hidden": [10**7, 10**6]})]}, "GB of layers"),
        ({"stages": [StageConfig("mlp", "a", 9, {"hidden": [10**12, 10**12]})]}, "GB of layers"),
        ({"stages": [StageConfig("transitions", "a", 9, {"successors": 10**10})]}, "GB of counts"),
        ({"schema": large_schema(10**12)}, "GB of tables"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test`, `export` and `load_from_checkpoint` build a model, with the numbers of a checkpoint."""
    monkeypatch.setattr("recsys_topk.machine.machine_memory", lambda: 2**30)
    schema = options.pop("schema", large_schema(10_000_000 if "transitions" in str(options) else 1000))
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        CascadeModule(schema, **{"stages": STAGES[:1], **options})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch with 1,000,000,000 eval_negatives needs .* GB, but the machine has"):
        RecFlowDataModule(eval_negatives=10**9, batch_size=1000)


def test_workers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"100,000 num_workers needs .* GB, .*; use a smaller --data.num_workers"):
        RecFlowDataModule(num_workers=100_000)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"users": 10**10}, "users"), ({"items": 10**10}, "items"), ({"requests": 10**11}, "requests"),
        ({"dim": 10**10}, "retrieved"), ({"retrieved": 10**10, "searched": 10**10}, "retrieved"),
        ({"searched": 10**12, "items": 10**8, "retrieval_noise": 0.3}, "searched"),
    ],
)  # fmt: skip
def test_worlds_that_do_not_fit_are_refused(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"the simulated world needs .* use a smaller --data.world.{name}, now"):
        simulate(tmp_path / "world", WorldConfig(**changed))
    assert not (tmp_path / "world").exists()


def test_histories_that_do_not_fit_are_refused(tiny_world: Path) -> None:
    data = RecFlowDataModule(tiny_world, history_length=10**12, cache_dir=tiny_world.parent)
    data.prepare_data()
    with pytest.raises(ValueError, match=r"histories of 1,000,000,000,000 views needs .* --data.history_length"):
        data.loader(data.splits["test"], training=False)


@pytest.fixture
def tiny_world(tmp_path: Path) -> Path:
    return simulate(tmp_path / "world", WorldConfig(users=20, items=200, days=3, requests=30))
