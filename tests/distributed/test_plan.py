"""Plans of tables larger than memory, and the strategy in config files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.config import resolve
from recsys_topk.strategies.plan import one_table, plan
from recsys_topk.strategies.sharding import bytes_of
from recsys_topk.strategies.torchrec import TorchRecStrategy
from recsys_topk.tabular.schema import Feature, Schema
from tests.cascades.batches import random_batch


def test_billion_rows_are_divided_evenly() -> None:
    found = plan(one_table(10**9, 96, "rowwise_adagrad"), 8, "cuda", bytes_of("80GB"))
    (table,) = found.tables
    assert [table[key] for key in ("rows", "dim", "sharding", "shards")] == ["1,000,000,000", 96, "row_wise", 8]
    expected = 10**9 // 8 * (96 + 1) * 4  # weights, and one optimizer value per row
    assert found.weights == 10**9 * 96 * 4
    assert all(expected <= one < 1.05 * expected for one in found.per_device)


def test_error_for_tables_that_do_not_fit_names_a_solution() -> None:
    with pytest.raises(ValueError, match=r"384.00 GB of weights\) do not fit: 2 processes .* 8 devices are enough"):
        plan(one_table(10**9, 96, "rowwise_adagrad"), 2, "cuda", bytes_of("80GB"))
    with pytest.raises(ValueError, match="splits rows"):
        plan(one_table(1000, 8, "rowwise_adagrad"), 2, "cpu", None, sharding="column_wise")
    with pytest.raises(ValueError, match="a number with a unit such as 80GB"):
        bytes_of("much")


def test_command_plans_the_tables_of_a_run(
    in_process: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = in_process(tmp_path, "plan", "--world-size", "2", "--device", "cpu", "--model.dim", "8")
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    assert "ranking.items_history.video_id" in done.stdout  # type: ignore[attr-defined]


def test_config_file_can_name_the_strategy(tmp_path: Path) -> None:
    text = "trainer:\n  strategy:\n    class_path: torchrec\n    init_args: {sharding: row_wise, memory: 2GB}\n"
    (tmp_path / "my.yaml").write_text(text)
    options = TrainingRun({"config": str(tmp_path / "my.yaml")}).options()["trainer"]["strategy"]
    assert options["class_path"].endswith("TorchRecStrategy")
    assert (options["init_args"]["sharding"], options["init_args"]["memory"]) == ("row_wise", "2GB")
    assert resolve({"trainer": {"strategy": "torchrec"}})["trainer"]["strategy"] == "torchrec"
    with pytest.raises(ValueError, match="sharding must be one of"):
        TorchRecStrategy(sharding="by_hand")  # type: ignore[arg-type]


@pytest.mark.slow
def test_features_without_tables_train_with_plain_data_parallelism(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    numbers = (Feature("price", kind="numeric"), Feature("picture", kind="vector", size=3))
    schema = Schema(tables=(), request=(Feature("age", kind="numeric"),), history=(), items=numbers, positive_above=7.0)
    module = CascadeModule(schema, stages=[StageConfig("mlp", "ranking", 4, {"hidden": [8]})], k=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=TorchRecStrategy(), max_steps=2, logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = module.cascade.stages["ranking"].mlp.first.weight.detach().clone()  # type: ignore[union-attr]
    batches: Any = torch.utils.data.DataLoader([random_batch(schema)] * 2, batch_size=None)  # type: ignore[arg-type]
    with mock.patch.dict(os.environ):  # Lightning sets the rank there
        try:
            trainer.fit(module, batches)
        finally:
            torch.distributed.destroy_process_group()
    assert not torch.equal(before, module.cascade.stages["ranking"].mlp.first.weight)  # type: ignore[union-attr]
