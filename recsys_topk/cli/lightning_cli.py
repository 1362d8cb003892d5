"""LightningCLI over the cascade and the data: what `recsys_topk.cli.training` runs."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from recsys_topk.callbacks.predictions import PredictionWriter
from recsys_topk.cascades.features import table_sizes
from recsys_topk.cascades.module import TWO_STAGES, CascadeModule
from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.cascades.optimizers import EmbeddingOptimizerName, OptimizerName
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cli.console import echo, table, warn
from recsys_topk.cli.runs import RunDirectory, offline_wandb, run_name
from recsys_topk.datamodules.recflow import RecFlowDataModule
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.dftopk import DFTopKLoss
from recsys_topk.memory import keep_freed_memory
from recsys_topk.registry import nearest

DEFAULT_LOSS = {"class_path": f"{DFTopKLoss.__module__}.{DFTopKLoss.__qualname__}"}
# Notices of libraries that say nothing about the run.
NOTICES = (
    "Failed to import: fbgemm_gpu",
    "is now DEPRECATED",
    "does not have many workers",
    "LeafSpec",
    "The number of training batches",
    "Checkpoint directory",
    "callbacks used to create the checkpoint",
)
GREETINGS = (
    "GPU available",
    "TPU available",
    "HPU available",
    "💡",
    "`Trainer.",
    "Restoring",
    "Loaded model weights",
    "Using",
)
TRAINER_DEFAULTS = {
    "max_epochs": 1,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
}


def cascade(
    schema: Any,
    loss: RankingLoss,
    stages: list[StageConfig],
    objective: Callable[[RankingLoss, int], CascadeObjective] | None = None,
    k: int = 10,
    dim: int | dict[str, int] = 8,
    share_embeddings: bool = False,
    optimizer: OptimizerName = "adam",
    lr: float = 1e-2,
    embedding_optimizer: EmbeddingOptimizerName = "same",
    embedding_lr: float | None = None,
    optimizer_options: dict[str, float] | None = None,
    warmup_steps: int = 0,
    validate: bool = True,
) -> CascadeModule:
    """Build the module from what the command line gives.

    Args:
        schema: The features; taken from the data.
        loss: The loss; `--loss NAME` for short.
        stages: The stages, first to last.
        objective: How the stages are trained together; `--objective NAME` for short.
        k: How many items are wanted in the end.
        dim: Embedding dimension, one for all tables or by table name.
        share_embeddings: All stages use one set of tables.
        optimizer: Name of the optimizer.
        lr: Learning rate.
        embedding_optimizer: Optimizer that updates the tables inside backward; `same` leaves them to `optimizer`.
        embedding_lr: Learning rate of such tables; `lr` if not given.
        optimizer_options: Further arguments of the optimizer, e.g. {eps: 1.0e-12}.
        warmup_steps: Steps over which the learning rate rises to `lr`.
        validate: Raise on NaN or infinity among the scores instead of training on.
    """
    return CascadeModule(
        schema,
        stages=stages,
        loss=loss,
        objective=objective,
        k=k,
        dim=dim,
        share_embeddings=share_embeddings,
        optimizer=optimizer,
        lr=lr,
        embedding_optimizer=embedding_optimizer,
        embedding_lr=embedding_lr,
        optimizer_options=optimizer_options,
        warmup_steps=warmup_steps,
        validate=validate,
    )


class Parser(LightningArgumentParser):  # type: ignore[misc]  # lightning is untyped here
    """LightningCLI's parser with errors of one line, and without guessing at abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: BaseException | None = None) -> NoReturn:
        """Say what is wrong, with the nearest option where one was misspelt, and exit with status 2."""
        text = " ".join(str(ex if ex is not None else message).split())
        unknown = re.search(r"(--[\w.-]+)", text) if "nrecognized" in text or "not accepted" in text else None
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            close = nearest(unknown.group(1), options)
            text += f"; did you mean {close}?" if close else ""
        warn(f"recsys-topk: {text}")
        raise SystemExit(2)


class SaveConfig(SaveConfigCallback):  # type: ignore[misc]  # lightning is untyped here
    """Saves the configuration as config.yaml, and as the config of the W&B run if there is one."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log the whole resolved configuration once; let W&B's summary keep the best recall, not the last."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams(yaml.safe_load(self.parser.dump(self.config, skip_none=False)))
                logger.experiment.define_metric("val/*", summary="max")


class CascadeCLI(LightningCLI):  # type: ignore[misc]  # lightning is untyped here
    """The training commands: a directory for each run, loggers, checkpoints, and a table at the end."""

    run: RunDirectory

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what is ours to LightningCLI's arguments."""
        parser.add_argument("--out", type=str, default="runs", help="folder in which each run gets its own")
        parser.add_argument(
            "--name", type=str | None, default=None, help="the run's name; made from its options if not given"
        )
        parser.add_argument(
            "--logger", type=Literal["csv", "wandb"], default="csv", help="metrics.csv is always written"
        )
        stages = [config.to_dict() for config in TWO_STAGES]
        parser.set_defaults({"model.loss": DEFAULT_LOSS, "model.stages": stages})
        parser.link_arguments("data.schema", "model.schema", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the checkpoint's config has been read before the command line (`arguments.from_checkpoint`)."""

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the run's directory, loggers and callbacks."""
        options = self.config[self.subcommand]
        name = options.name or run_name(self.model, self.datamodule, options.seed_everything)
        self.run = RunDirectory(Path(options.out), name if self.subcommand == "fit" else f"{self.subcommand}-{name}")
        trainer_options = self._get(self.config_init, "trainer")
        if trainer_options.get("logger") in (None, True):
            kwargs["logger"] = self.loggers(options.logger)
        kwargs["default_root_dir"] = str(self.run.path)
        kwargs["callbacks"] = [*(trainer_options.get("callbacks") or []), *self.callbacks()]
        trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
        return trainer

    def loggers(self, kind: str) -> list[Logger]:
        """Return the loggers: CSV always, W&B too if asked for (offline without a key, so that nothing prompts)."""
        made: list[Logger] = [CSVLogger(str(self.run.path.parent), name=self.run.path.name, version="")]
        if kind == "wandb":
            offline = offline_wandb()
            made.append(
                WandbLogger(
                    name=self.run.path.name, save_dir=str(self.run.path), project="recsys-topk", offline=offline
                )
            )
        return made

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that every run has."""
        wanted = self._get(self.config_init, "trainer")
        made: list[Callback] = []
        if wanted.get("enable_progress_bar") is not False:
            made.append(RichProgressBar() if sys.stdout.isatty() else TQDMProgressBar(refresh_rate=10))
        if self.subcommand == "fit" and wanted.get("enable_checkpointing") is not False:
            quota = self.model.cascade.quotas[-1]
            made.append(
                ModelCheckpoint(
                    dirpath=self.run.path / "checkpoints",
                    filename="best",
                    monitor=f"val/joint_recall@{self.model.k}@{quota}",
                    mode="max",
                    save_last=True,
                    enable_version_counter=False,
                )
            )
        if self.subcommand == "predict":
            made.append(PredictionWriter(self.run.path / "predictions.parquet"))
        return made

    def before_fit(self) -> None:
        """Say what is trained and where the run goes."""
        self._announce()

    def after_fit(self) -> None:
        """Print what was reached and what was written."""
        self._report()

    def _announce(self) -> None:
        model = self.model
        stages = " -> ".join(f"{config.name} ({config.kind}, {config.quota})" for config in model.cascade.configs)
        trained = (
            f"{model.loss.name} under {model.objective.name}" if model.objective.uses_loss else model.objective.name
        )
        echo(f"{self.subcommand}: {trained}; {stages}")
        first = next(iter(model.cascade.stages.values()))
        largest = ", ".join(f"{row['table']} {row['rows']} x {row['dim']}" for row in table_sizes(first.embedding)[:3])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        echo(f"  {parameters:,} parameters; largest tables of a stage: {largest}")
        echo(f"  run directory {self.run.path}")

    def _report(self) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        shown = {name: value for name, value in metrics.items() if not name.startswith("train/")}
        if shown:
            echo(table([{"metric": name, "value": value} for name, value in shown.items()]))
        self.run.echo_files()

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "fit":
            super()._run_subcommand(subcommand)
            return
        self._announce()
        quietly = {"return_predictions": False} if subcommand == "predict" else {"verbose": False}
        checkpoint = self.config[subcommand].ckpt_path
        getattr(self.trainer, subcommand)(self.model, datamodule=self.datamodule, ckpt_path=checkpoint, **quietly)
        self._report()


def run_cli(arguments: list[str]) -> CascadeCLI:
    """Parse and run arguments that `recsys_topk.cli.arguments.rewrite` has prepared."""
    quiet_libraries()
    keep_freed_memory()
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        return CascadeCLI(
            cascade,
            RecFlowDataModule,
            parser_class=Parser,
            seed_everything_default=42,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults=TRAINER_DEFAULTS,
            load_from_checkpoint_support=False,
            auto_configure_optimizers=False,
        )
    except MisconfigurationException as error:
        raise ValueError(_advice(str(error))) from error
    finally:
        sys.argv = before


def _advice(message: str) -> str:
    """Return Lightning's message, with what to type where it does not say."""
    if "gpu backend" in message or "CUDAAccelerator" in message:
        return "--trainer.accelerator asks for a GPU and none is visible here; use --trainer.accelerator cpu (or auto)"
    return message


def _says_something(record: logging.LogRecord) -> bool:
    """Drop Lightning's greetings; what the data module says about the world it makes goes through the same logger."""
    return not record.getMessage().startswith(GREETINGS)


def quiet_libraries() -> None:
    """Silence notices that say nothing about the run: TorchRec's import and Lightning's advice on workers."""
    for pattern in NOTICES:
        warnings.filterwarnings("ignore", message=f".*{pattern}.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="fbgemm_gpu.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_says_something)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
