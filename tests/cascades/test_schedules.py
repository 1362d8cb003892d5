"""Schedules by name give the learning rates of torch's own, on ordinary and on fused tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import lr_scheduler

from recsys_topk.cascades.optimizers import DenseAndFused
from recsys_topk.cascades.schedules import NAMES, describe_schedule, make_schedule
from tests.cascades.test_module import batches, module, trainer

# Required options per class.
REQUIRED: dict[str, dict[str, Any]] = {
    "CosineAnnealingWarmRestarts": {"T_0": 3}, "ExponentialLR": {"gamma": 0.9}, "MultiStepLR": {"milestones": [2, 4]},
    "OneCycleLR": {"max_lr": 0.1, "cycle_momentum": False}, "StepLR": {"step_size": 2},
}  # fmt: skip
LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters",
           "LinearLR": "total_iters", "ConstantLR": "total_iters"}  # fmt: skip


class Rates(pl.Callback):  # type: ignore[misc]
    """Records the learning rate of every parameter group and every fused table at every step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = pl_module.optimizers().optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        if isinstance(optimizer, DenseAndFused):
            for part in optimizer._fused.values():
                rates += [group["lr"] for group in part.param_groups]
        self.rates.append(rates)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ReduceLROnPlateau"])
def test_every_group_and_table_follows_the_schedule_of_torch(name: str, tmp_path: Path) -> None:
    options = REQUIRED.get(name, {})
    rates = Rates()
    described = {"class_path": name, "init_args": options}
    model = module(embedding_optimizer="rowwise_adagrad", lr=0.05, lr_scheduler=described)
    trainer(tmp_path, callbacks=[rates], max_epochs=2).fit(model, batches(3))

    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    length = {LENGTHS[name]: 6} if name in LENGTHS else {}
    schedule = getattr(lr_scheduler, name)(plain, **length, **options)
    expected = []
    for _ in range(6):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        schedule.step()
    assert len(rates.rates[0]) > 2
    for found, rate in zip(rates.rates, expected, strict=True):
        assert found == pytest.approx([rate] * len(found), rel=1e-9)


def test_schedule_starts_after_warm_up_and_can_be_stepped_per_epoch(tmp_path: Path) -> None:
    rates = Rates()
    model = module(lr=0.1, warmup_steps=2, lr_scheduler={"class_path": "CosineAnnealingLR"})
    trainer(tmp_path, callbacks=[rates], max_epochs=2).fit(model, batches(3))
    cosine = [0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert [found[0] for found in rates.rates] == pytest.approx([0.05, 0.1, *cosine])
    rates = Rates()
    model = module(lr=0.1, lr_scheduler={"class_path": "StepLR", "step_size": 1, "gamma": 0.5, "interval": "epoch"})
    trainer(tmp_path, callbacks=[rates], max_epochs=3).fit(model, batches(2))
    assert [found[0] for found in rates.rates] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


def test_plateau_of_the_monitored_metric_lowers_the_rate(tmp_path: Path) -> None:
    rates = Rates()
    plateau = {"class_path": "ReduceLROnPlateau", "patience": 0, "factor": 0.5}
    model = module(lr=1e-30, lr_scheduler=plateau)  # nothing is learned, so the metric never rises
    fitting = trainer(tmp_path, callbacks=[rates], max_epochs=3)
    fitting.fit(model, batches(1), batches(1))
    assert [found[0] for found in rates.rates] == pytest.approx([1e-30, 1e-30, 0.5e-30], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("CosineAnealingLR", "did you mean 'CosineAnnealingLR'"),
        ("LambdaLR", "unknown lr_scheduler 'LambdaLR'; available: ConstantLR"),
        ("os.system", "unknown lr_scheduler 'os.system'"),
        ({"class_path": "StepLR", "size": 3}, "StepLR has no option 'size'.* it has: step_size, gamma"),
        ({"class_path": "StepLR", "step_size": 3, "interval": "day"}, "must be step or epoch, got 'day'"),
    ],
)
def test_errors_list_the_available_names(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_schedule(given)


def test_missing_option_or_warm_up_with_plateau_raises() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    known: dict[str, Any] = {"length": lambda interval: 10, "monitor": "val/x"}
    with pytest.raises(ValueError, match=r"--lr_scheduler StepLR: .*step_size"):
        make_schedule(optimizer, describe_schedule("StepLR"), warmup_steps=0, **known)
    with pytest.raises(ValueError, match="warmup_steps=3 counts steps, but ReduceLROnPlateau is stepped per epoch"):
        make_schedule(optimizer, describe_schedule("ReduceLROnPlateau"), warmup_steps=3, **known)
