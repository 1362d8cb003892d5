"""Trainings of one cascade that differ in how they are run; called by the test itself and by its processes."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from recsys_topk.callbacks.resume_point import WholeFileIO
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import tables_on_meta
from recsys_topk.strategies.torchrec import TorchRecStrategy
from tests.datamodules.in_memory import InMemory

GLOBAL_BATCH, STEPS = 12, 50
STAGES = (
    StageConfig("two_tower", "retrieval", 9, {"hidden": [16, 8]}),
    StageConfig("din", "ranking", 4, {"hidden": [16, 8], "attention": 8}),
)


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: Identifies it.
        strategy: ``"ddp"``, or how the tables are sharded.
        tables: Optimizer of the tables.
        dense: Optimizer of the rest.
        model: Further arguments of the module.
        data: Further arguments of the data module.
        steps: How many.
    """

    name: str
    strategy: str
    tables: str
    dense: str = "sgd"
    model: tuple[tuple[str, Any], ...] = ()
    data: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS


NORMED = tuple(
    StageConfig(s.kind, s.name, s.quota, {**s.options, "batch_norm": 0.9} if s.kind == "din" else s.options)
    for s in STAGES
)
MORE = {"table_wise adagrad", "row_wise rowwise_adagrad", "column_wise adagrad"}
CASES = [
    Case("table_wise sgd", "table_wise", "sgd"),
    Case("table_wise adagrad", "table_wise", "adagrad", "adam"),
    Case("table_wise rowwise_adagrad", "table_wise", "rowwise_adagrad"),
    Case("row_wise sgd", "row_wise", "sgd", model=(("warmup_steps", 20),)),
    Case("row_wise adagrad", "row_wise", "adagrad", "adam"),
    Case("row_wise rowwise_adagrad", "row_wise", "rowwise_adagrad"),
    Case("column_wise sgd", "column_wise", "sgd"),
    Case("column_wise adagrad", "column_wise", "adagrad"),
    Case("auto shared", "auto", "rowwise_adagrad", model=(("share_embeddings", True),)),
    Case("ddp batch norm", "ddp", "same", model=(("stages", NORMED),)),
    Case("ddp gathered", "ddp", "same", data=(("negative_source", "in_global_batch"),)),
]
# Adam makes steps of the size of its rate from any gradient, and these have none but rounding: a constant that is added
# to all scores of a list changes no loss that looks at their order.
SHIFTS = ("retrieval.item_tower.tail.1.bias", "ranking.mlp.tail.3.bias")


def cases(processes: int) -> list[Case]:
    """The cases that are run with two processes, or some of them with more; RECSYS_TOPK_ALL_CASES=1 runs all."""
    everything = processes == 2 or bool(os.environ.get("RECSYS_TOPK_ALL_CASES"))
    return [case for case in CASES if everything or case.name in MORE]


class Losses(Callback):
    """Keeps the loss of every step; saves after the last one, inside the epoch."""

    def __init__(self, save: Path | None) -> None:
        self.values: list[float] = []
        self.save = save

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))
        if self.save is not None and trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.save)


def make(case: Case, processes: int, on_meta: bool = False) -> tuple[CascadeModule, InMemory]:
    options = {"train_negatives": 6, "negative_source": "uniform", **dict(case.data)}
    data = InMemory(245, batch_size=GLOBAL_BATCH // processes, eval_batch_size=120 // processes, **options)
    torch.manual_seed(1)
    rate = 0.02 if case.dense == "adam" else 0.1
    with tables_on_meta(on_meta):
        module = CascadeModule(
            data.schema, **{"stages": STAGES, "k": 2, "lr": rate, "optimizer": case.dense, "embedding_lr": 0.1,
                            "embedding_optimizer": case.tables, **dict(case.model)},
        )  # fmt: skip
    return module, data


def trainer_of(case: Case, processes: int, folder: Path, steps: int, *callbacks: Callback) -> pl.Trainer:
    strategy: Any = "auto"
    if processes > 1:
        strategy = "ddp" if case.strategy == "ddp" else TorchRecStrategy(sharding=case.strategy)  # type: ignore[arg-type]
    return pl.Trainer(
        accelerator="cpu", devices=processes, strategy=strategy, max_steps=steps, max_epochs=100, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        log_every_n_steps=1, default_root_dir=folder, callbacks=list(callbacks), plugins=[WholeFileIO()],
    )  # fmt: skip


def train(case: Case, processes: int, folder: Path, resume: Path | None = None, save: Path | None = None,
          steps: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Train, measure, and return losses, metrics, weights (in process 0) and what must be equal in all processes."""
    warnings.simplefilter("ignore")
    module, data = make(case, processes)
    losses = Losses(save)
    trainer = trainer_of(case, processes, folder, case.steps if steps is None else steps, losses)
    trainer.fit(module, data, ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = trainer.strategy.lightning_module_state_dict()
    (tested,) = trainer.test(module, data, verbose=False)
    dense = b"".join(value.numpy().tobytes() for key, value in module.state_dict().items() if "collections" not in key)
    return {
        "losses": losses.values,
        "metrics": {**metrics, **tested},
        "weights": {key: value.clone() for key, value in weights.items()},
        "digest": hashlib.sha256(dense).hexdigest(),
    }
