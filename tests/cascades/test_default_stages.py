"""Default stages by features, cascades of one stage, and data with numeric features only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from recsys_topk.cascades import CascadeModule, StageConfig
from recsys_topk.cascades.default_stages import default_stages
from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.stage import registry
from recsys_topk.runs import TrainingRun
from recsys_topk.tabular.schema import Feature, Schema, Table
from tests.cascades.batches import random_batch
from tests.datamodules.numeric_only import NumericOnly

USER, ITEM, PRICE = Feature("user", "user"), Feature("item", "item"), Feature("price", kind="numeric")
TABLES = (Table("user", 9), Table("item", 30))
METRICS = [{"metric": "ndcg", "k": 3}, "joint_recall"]
CONFIG: dict[str, Any] = {
    "data": {"class_path": "tests.datamodules.numeric_only.NumericOnly"},
    "model": {"k": 3, "metrics": METRICS, "lr": 0.02},
    "trainer": {"max_epochs": 8, "enable_progress_bar": False, "log_every_n_steps": 1},
}


@pytest.mark.parametrize(
    ("request_features", "history", "items", "kinds"),
    [
        ((USER,), (ITEM,), (ITEM,), ["two_tower", "din"]),
        ((USER,), (), (ITEM,), ["two_tower", "mlp"]),
        ((), (ITEM,), (ITEM,), ["two_tower", "din"]),
        ((PRICE,), (), (PRICE,), ["two_tower", "mlp"]),
        ((), (), (ITEM,), ["mlp"]),
        ((), (), (PRICE,), ["mlp"]),
    ],
)
def test_default_stages_can_be_built_and_learn_from_every_part(
    request_features: tuple[Feature, ...], history: tuple[Feature, ...], items: tuple[Feature, ...], kinds: list[str]
) -> None:
    schema = Schema(TABLES, request_features, history, items)
    model = CascadeModule(schema, k=2)
    assert [config.kind for config in model.cascade.configs] == kinds
    sum(scores.sum() for scores in model(random_batch(schema))).backward()  # type: ignore[union-attr]
    untrained_parameters = [name for name, p in model.cascade.named_parameters() if p.requires_grad and p.grad is None]
    assert untrained_parameters == []
    # Stages that the default leaves out refuse these features.
    for kind in ("two_tower", "din"):
        refused = kind not in kinds and not (kind == "two_tower" and (request_features or history))
        if refused:
            with pytest.raises(ValueError, match="use the stage 'mlp'"):
                registry.resolve(kind)(FeatureEmbedding(schema, 4))
    assert [stage["kind"] for stage in model.hparams["stages"]] == kinds
    assert [config.kind for config in default_stages(schema.outline)] == kinds


def test_explicit_stages_replace_the_default() -> None:
    schema = Schema(TABLES, (USER,), (ITEM,), (ITEM,))
    model = CascadeModule(schema, [StageConfig("mlp", "only", 4)], k=2)
    assert [config.kind for config in model.cascade.configs] == ["mlp"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_numeric_features_alone_train_resume_test_and_predict(here: Path) -> None:
    lines: list[str] = []
    loss = "dftopk"
    model = {**CONFIG["model"], "embedding_optimizer": "rowwise_adagrad", "share_embeddings": True, "warmup_steps": 3}
    whole = TrainingRun({**CONFIG, "loss": loss, "model": model, "name": "whole"}, log_line=lines.append)
    metrics = whole.fit()
    assert "no embedding tables" in "\n".join(lines)
    untrained = {**CONFIG, "loss": loss, "model": {**model, "lr": 0.0}, "name": "untrained"}
    assert metrics["val/ranking_ndcg@3"] > TrainingRun(untrained).fit()["val/ranking_ndcg@3"] + 0.1
    assert "kind: mlp" in (whole.directory.path / "config.yaml").read_text()

    tested = whole.test()
    checkpoint = whole.directory.path / "checkpoints" / "last.ckpt"
    again = TrainingRun({"ckpt_path": str(checkpoint)}, trust=["tests"])
    assert again.test() == pytest.approx(tested, abs=1e-6)
    predicted = pq.read_table(TrainingRun({"ckpt_path": str(checkpoint)}, trust=["tests"]).predict())
    masks = [batch.mask for batch in NumericOnly().test_dataloader()]
    assert predicted.num_rows == sum(int(mask.sum()) for mask in masks)
    assert {"request_id", "item_id", "score_ranking", "kept", "rank"} <= set(predicted.column_names)

    half = {**CONFIG, "loss": loss, "model": model, "name": "half", "trainer": {**CONFIG["trainer"], "max_epochs": 4}}
    TrainingRun(half).fit()
    resumed = TrainingRun({"trainer": {"max_epochs": 8}}, resume=str(here / "runs" / "half"), trust=["tests"])
    resumed.fit()
    weights, others = whole.model.state_dict(), resumed.model.state_dict()
    assert list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("quota", [2, 3, 50])
def test_single_stage_keeps_its_quota_for_any_k(quota: int) -> None:
    data = NumericOnly()
    model = CascadeModule(data.schema, [StageConfig("mlp", "only", quota)], k=3)
    batch = next(iter(data.test_dataloader()))
    predicted = model.predict_step(batch, 0)
    kept = torch.zeros(batch.size, dtype=torch.int64)
    kept.scatter_add_(0, predicted["request_id"] - 2000, predicted["kept"].long())
    assert torch.equal(kept, batch.mask.sum(1).clamp_max(quota))
    metrics = model.update_metrics("test", model(batch), batch)
    joint, own = metrics[f"joint_recall@3@{quota}"], metrics[f"only_recall@3@{quota}"]
    assert float(joint.compute()) == float(own.compute())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": {"k": 12}},
            "selects the best 12 items of each list, but training lists have at most 12 items.*--model.k",
        ),
        ({"objective": "fs_ranknet"}, "needs at least 2, but the data has 1.*--objective independent"),
        (
            {"model": {"stages": [{"kind": "din", "name": "ranking", "quota": 3}]}},
            "stage 'din' attends to the user's history.*use the stage 'mlp'",
        ),
    ],
    ids=["k covers the lists", "no groups", "no history"],
)
def test_impossible_combinations_raise_before_training(here: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingRun({**CONFIG, **change}).fit()
    assert not list(here.rglob("*.ckpt"))
