"""Trains one cascade with different strategies and optimizers; used by the test and by its processes."""

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
from recsys_topk.strategies.full_tensors import gather
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
        name: Name of the case.
        strategy: ``"ddp"``, or the sharding of the tables.
        tables: Optimizer of the tables.
        dense: Optimizer of the other parameters.
        model: Further arguments of the module.
        data: Further arguments of the data module.
        steps: Number of steps.
        single_file: The largest tables that are saved as one file.
    """

    name: str
    strategy: str
    tables: str
    dense: str = "sgd"
    model: tuple[tuple[str, Any], ...] = ()
    data: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS
    single_file: str = "100MB"


NORMED = tuple(
    StageConfig(s.kind, s.name, s.quota, {**s.options, "batch_norm": 0.9} if s.kind == "din" else s.options)
    for s in STAGES
)
ORDERED = (
    StageConfig("two_tower", "retrieval", 9, {"hidden": [16, 8], "history": {"kind": "transformer", "dropout": 0.0}}),
    StageConfig("din", "ranking", 4, {"hidden": [16, 8], "attention": 8, "history": "recency"}),
)
QUICK = {"row_wise adagrad", "auto shared", "ddp batch norm"}  # the cases of `make test`, with two processes
WITH_THREE_PROCESSES = {"table_wise adagrad", "row_wise rowwise_adagrad", "column_wise adagrad"}
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
    Case("row_wise ordered", "row_wise", "adagrad", model=(("stages", ORDERED),), steps=20),
    Case("ddp gathered", "ddp", "same", data=(("negative_source", "in_global_batch"),)),
]
# Biases that add a constant to all scores of a list do not change the loss. Their gradients are rounding errors, from
# which Adam still makes steps of full size, so they are not compared.
SHIFTS = ("retrieval.item_tower.tail.1.bias", "ranking.mlp.tail.3.bias")


def cases(processes: int, group: str) -> list[Case]:
    """Return the cases of a group: "quick", or the others, "long"; RECSYS_TOPK_ALL_CASES=1 selects all."""
    all_cases = processes == 2 or bool(os.environ.get("RECSYS_TOPK_ALL_CASES"))
    chosen = [case for case in CASES if all_cases or case.name in WITH_THREE_PROCESSES]
    return [case for case in chosen if (group == "quick") == (processes == 2 and case.name in QUICK)]


class Losses(Callback):
    """Records the loss of every step; saves a checkpoint after the last step, inside the epoch."""

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
        strategy = "ddp"
        if case.strategy != "ddp":
            strategy = TorchRecStrategy(sharding=case.strategy, single_file=case.single_file)  # type: ignore[arg-type]
    return pl.Trainer(
        accelerator="cpu", devices=processes, strategy=strategy, max_steps=steps, max_epochs=100, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        log_every_n_steps=1, default_root_dir=folder, callbacks=list(callbacks), plugins=[WholeFileIO()],
    )  # fmt: skip


def full_weights(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Return the weights of all processes, on rank 0."""
    weights = trainer.strategy.lightning_module_state_dict()
    return gather(weights) if isinstance(trainer.strategy, TorchRecStrategy) else weights


def train(case: Case, processes: int, folder: Path, resume: Path | None = None, save: Path | None = None,
          steps: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Train and test; return losses, metrics, weights (on rank 0) and a digest that must be equal on all ranks."""
    warnings.simplefilter("ignore")
    module, data = make(case, processes)
    losses = Losses(save)
    trainer = trainer_of(case, processes, folder, case.steps if steps is None else steps, losses)
    trainer.fit(module, data, ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = full_weights(trainer)
    (tested,) = trainer.test(module, data, verbose=False)
    dense = b"".join(value.numpy().tobytes() for key, value in module.state_dict().items() if "collections" not in key)
    return {
        "losses": losses.values,
        "metrics": {**metrics, **tested},
        "weights": {key: value.clone() for key, value in weights.items()},
        "digest": hashlib.sha256(dense).hexdigest(),
    }
