"""Each packaged recipe runs on a tiny world and has its effect."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from recsys_topk.cli.main import main
from recsys_topk.runs import TrainingRun
from recsys_topk.runs.summary import advice, next_commands
from recsys_topk.runs.trials import Competition
from tests.conftest import TINY_WORLD
from tests.runs.test_resume import assert_same_run

TINY: dict[str, Any] = {
    "data": {
        "world": {"users": 40, "items": 300, "days": 4, "requests": 120},
        "batch_size": 60,
        "eval_negatives": 40,
    },
    "trainer": {"enable_progress_bar": False},
    "baselines": False,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RECSYS_TOPK_CACHE", "HOME"):
        monkeypatch.setenv(name, environment[name])
    return tmp_path


def recipe(name: str, **config: Any) -> TrainingRun:
    return TrainingRun({"config": [TINY, name, config], "name": name})


def test_cosine_schedule_ends_at_its_lowest_rate_for_fused_tables_too(here: Path) -> None:
    options = {"warmup_steps": 2, "embedding_optimizer": "rowwise_adagrad", "embedding_lr": 0.02}
    recipe("cosine-schedule", model=options, trainer={"max_epochs": 2}).fit()
    saved = torch.load(here / "runs" / "cosine-schedule" / "checkpoints" / "last.ckpt", weights_only=True)
    state = saved["optimizer_states"][0]
    # 8 steps with 2 warm-up steps: the last step is the end of the cosine, where the rate is eta_min.
    assert state["dense"]["param_groups"][0]["lr"] == pytest.approx(1e-4)
    assert state["fused"]
    assert all(table["lr"] == pytest.approx(1e-4) for table in state["fused"].values())
    config = yaml.safe_load((here / "runs" / "cosine-schedule" / "config.yaml").read_text())
    assert config["model"]["lr_scheduler"]["class_path"] == "torch.optim.lr_scheduler.CosineAnnealingLR"


def test_resumed_run_with_a_schedule_gives_identical_weights(here: Path) -> None:
    options = [
        *TINY_WORLD, "--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=9", "--model.warmup_steps=3",
        "--model.embedding_optimizer=rowwise_adagrad", "--baselines=false",
    ]  # fmt: skip
    assert main(["fit", *options, "--name=long", "--trainer.max_epochs=2"]) == 0
    assert main(["fit", *options, "--name=short", "--trainer.max_epochs=1"]) == 0
    assert main(["fit", "--resume=short", "--trainer.max_epochs=2"]) == 0
    assert_same_run(here / "runs" / "short", here / "runs" / "long")
    saved = torch.load(here / "runs" / "short" / "checkpoints" / "last.ckpt", weights_only=True)
    rate = saved["optimizer_states"][0]["dense"]["param_groups"][0]["lr"]
    assert rate == pytest.approx(0.005 * (1 + math.cos(math.pi * 5 / 9)))


def test_early_stopping_stops_when_nothing_is_learned(here: Path) -> None:
    run = recipe("early-stopping", model={"lr": 0.0})
    lines: list[str] = []
    run.log_line = lines.append
    run.fit()
    (best,) = (line for line in lines if line.startswith("best "))
    assert "stopped early after epoch 4 of " in best
    assert best.endswith(": val/joint_recall@10@20 did not improve in 3 validations")
    facts = json.loads((here / "runs" / "early-stopping" / "run.json").read_text())
    assert (facts["status"], facts["steps"], facts["epochs"]) == (
        "finished",
        16,
        4,
    )  # one epoch, then three that are not better


def test_early_stopping_on_an_unknown_metric_raises(here: Path) -> None:
    with pytest.raises(ValueError, match=r"EarlyStopping monitors .*did you mean 'val/joint_recall@5@20'"):
        recipe("early-stopping", model={"k": 5}).fit()
    assert not list(here.glob("runs/*"))


def test_gradient_clipping_bounds_the_update(here: Path) -> None:
    moved = {}
    for limit in (1.0, None):
        model = {"optimizer": "sgd", "lr": 1.0}
        trainer = {"limit_train_batches": 1, "limit_val_batches": 0, **({} if limit else {"gradient_clip_val": None})}
        run = recipe("gradient-clipping", model=model, loss={"class_path": "dftopk", "tau": 0.001}, trainer=trainer)
        before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
        run.fit()
        change = [(value.detach() - before[name]).norm() for name, value in run.model.named_parameters()]
        moved[limit] = float(torch.stack(change).norm())
    assert moved[1.0] == pytest.approx(1.0, abs=1e-3)
    assert moved[None] > 1.5


def test_gradient_clipping_of_fused_tables_raises(here: Path) -> None:
    with pytest.raises(ValueError, match="gradient clipping would not apply to them"):
        recipe("gradient-clipping", model={"embedding_optimizer": "rowwise_adagrad"}).fit()
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize("embedding_optimizer", ["same", "rowwise_adagrad"])
def test_bf16_computes_layers_in_bfloat16_and_keeps_weights_in_float32(embedding_optimizer: str) -> None:
    run = recipe("bf16", model={"embedding_optimizer": embedding_optimizer})
    seen: set[torch.dtype] = set()
    for part in run.model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    recall = run.fit()["val/joint_recall@10@20"]
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert 0.0 < recall <= 1.0


def log_of_interactions(folder: Path, users: int = 60, items: int = 50) -> Path:
    """Write clicks in which item i + 1 usually follows item i, so that the order of a history matters."""
    draw = np.random.default_rng(0)
    rows = ["user_id,item_id,timestamp"]
    for user in range(users):
        item = int(draw.integers(items))
        for time in range(12):
            rows.append(f"u{user},i{item},{1_700_000_000 + 1000 * user + time}")
            item = (item + 1) % items if draw.random() < 0.8 else int(draw.integers(items))
    file = folder / "clicks.csv"
    file.write_text("\n".join(rows) + "\n")
    return file


def test_trial_of_a_recipe_has_the_same_options_after_its_run_is_made(here: Path) -> None:
    variant = {"config": "interactions-cascade", "data": {"init_args": {"root": str(log_of_interactions(here))}}}
    trial = Competition({"recipe": variant}, out=here / "compared").trial(
        "recipe", variant, 0, "recipe", "tuning", "tune"
    )
    before = trial.identity()
    trial.run(enable_progress_bar=False)
    assert trial.identity() == before


def test_recipe_for_interactions_may_end_before_its_first_validation(here: Path) -> None:
    data = {"root": str(log_of_interactions(here)), "split": "leave_last", "batch_size": 4}
    changes = {"data": data, "trainer": {"max_steps": 2, "min_steps": 1, "enable_progress_bar": False}}
    run = TrainingRun({"config": ["interactions", changes], "name": "short"})
    run.fit()
    assert run.trainer.global_step == 2
    assert (here / "runs/short/checkpoints/last.ckpt").is_file()
    assert not (here / "runs/short/checkpoints/best.ckpt").exists()


@pytest.mark.filterwarnings("error:.*skipped every list")
def test_recipe_for_interactions_learns_the_order_and_keeps_the_best_epoch(here: Path) -> None:
    lines: list[str] = []
    data = {"root": str(log_of_interactions(here)), "split": "leave_last"}
    options = {"hidden": [], "popularity": True, "history": "transformer"}
    stages = [
        {"kind": "two_tower", "name": "retrieval", "quota": 20, "options": options},
        {"kind": "transitions", "name": "ranking", "quota": 5, "previous": "add_detached"},
    ]
    changes = {
        "data": data,
        "model": {"stages": stages, "monitor": "recall@5/corpus", "k": 5},
        "trainer": {"max_epochs": 6, "min_steps": 1, "enable_progress_bar": False, "callbacks": []},
    }
    run = TrainingRun({"config": ["interactions-cascade", changes], "name": "own"}, log_line=lines.append)
    run.fit()
    assert run.data.rows_per_batch() == round(256 * len(run.data.shard("train")) / run.data.shard("train").requests)
    values = [
        float(row["val/recall@5/corpus"])
        for row in csv.DictReader((here / "runs/own/metrics.csv").open())
        if row["val/recall@5/corpus"]
    ]
    assert len(values) == 6
    assert 6 * 17 <= run.trainer.global_step <= 6 * 32  # the log has three batches, which an epoch reads several times
    popularity = run.metrics["val/recall@5/popularity"]
    assert max(values) > 2 * popularity
    assert f"best val/recall@5/corpus {max(values):.4f} (best.ckpt)" in lines
    assert any("training steps, too few to learn much" in line for line in lines)
    assert not any("not better than ranking by popularity" in line for line in lines)
    best = TrainingRun({"ckpt_path": str(here / "runs/own/checkpoints/best.ckpt")}).validate({"cuts": [5]})
    assert best["val/recall@5/corpus"] == pytest.approx(max(values))


def test_a_run_that_is_not_better_than_popularity_says_so() -> None:
    (line,) = advice(500, 0.1, 0.1)
    assert line.startswith("note: the result is not better than ranking by popularity (0.1000)")
    assert advice(500, 0.2, 0.1) == advice(500, 0.2, None) == []
    assert "only 199 training steps" in advice(199, 0.2, 0.1)[0]


def test_no_comparison_is_suggested_where_other_losses_cannot_train(tmp_path: Path) -> None:
    run = recipe("simulated")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.ckpt").touch()
    usual = next_commands(tmp_path, run.model)
    assert [line.split()[1] for line in usual[1:]] == ["test", "compare", "export"]
    catalogue = next_commands(tmp_path, run.model, catalogue=True)
    assert [line.split()[1] for line in catalogue[1:]] == ["test", "export"]
    assert catalogue[1].endswith("best.ckpt --corpus")


def test_few_validation_requests_come_with_the_standard_error() -> None:
    (line,) = advice(500, 0.2, 0.1, 100)
    assert line.startswith("note: only 100 validation requests: the result has a standard error of about 0.040,")
    assert advice(500, 0.2, 0.1, 400) == []
