"""LightningCLI over the cascade and the data: what `recsys_topk.cli.training` runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import yaml
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger

from recsys_topk.callbacks.predictions import PredictionWriter
from recsys_topk.callbacks.progress import Pace, PlainProgress, RichProgress
from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint, TrainingStoppedError, WholeFileIO
from recsys_topk.cascades.module import TWO_STAGES, CascadeModule
from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.cascades.optimizers import EmbeddingOptimizerName, OptimizerName
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cli.console import echo, warn
from recsys_topk.datamodules import RecFlowDataModule
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.dftopk import DFTopKLoss
from recsys_topk.memory import keep_freed_memory
from recsys_topk.runs.config import read_checkpoint
from recsys_topk.runs.directory import RunDirectory, Status, first_process, run_name
from recsys_topk.runs.guard import guarded
from recsys_topk.runs.metrics_file import MetricsFile
from recsys_topk.runs.own_runs import remember
from recsys_topk.runs.parser import Parser
from recsys_topk.runs.quiet import quiet_libraries
from recsys_topk.runs.resume import Resumption, check_changes, check_schema
from recsys_topk.runs.summary import announce, report_end, report_stop
from recsys_topk.runs.wandb_logging import describe_run, make_wandb, wandb_loggers

DEFAULT_LOSS = {"class_path": f"{DFTopKLoss.__module__}.{DFTopKLoss.__qualname__}"}
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
    metrics: list[str | dict[str, Any]] | None = None,
    monitor: str | None = None,
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
        metrics: What to measure, e.g. [joint_recall, {name: ndcg, k: 5}]; the recalls if not given.
        monitor: The metric that decides which checkpoint is best, e.g. joint_recall@10@20.
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
        metrics=metrics,
        monitor=monitor,
    )


class SaveConfig(SaveConfigCallback):  # type: ignore[misc]  # lightning is untyped here
    """Saves the configuration as config.yaml, and as the config of the W&B run if there is one."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the whole resolved configuration once, the file whole or not at all."""
        text = self.parser.whole(self.config)
        folder = Path(trainer.default_root_dir)
        partial = folder / ".config.yaml.partial"
        partial.write_text(f"# lightning.pytorch=={pl.__version__}\n{text}", encoding="utf-8")
        partial.replace(folder / "config.yaml")
        for logger in wandb_loggers(trainer.loggers):
            # The plain names, because a class path depends on how the loss was chosen.
            trained = pl_module.loss.name if pl_module.objective.uses_loss else pl_module.objective.name
            names = {"loss": trained, "objective": pl_module.objective.name}
            recalls = [f"val/{name}" for name in pl_module.metrics["val"]]
            describe_run(logger, {**yaml.safe_load(text), **names}, recalls)


class CascadeCLI(LightningCLI):  # type: ignore[misc]  # lightning is untyped here
    """The training commands: a directory for each run, loggers, checkpoints, and a table at the end.

    Args:
        args: As LightningCLI's.
        resumption: The run to go on with; None = a new one.
        execute: Run the command; otherwise only build its parts, for `run_command` or for a loop of one's own.
        kwargs: As LightningCLI's.
    """

    run: RunDirectory

    def __init__(self, *args: Any, resumption: Resumption | None = None, execute: bool = True, **kwargs: Any) -> None:
        self.resumption = resumption
        self.execute = execute
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what is ours to LightningCLI's arguments."""
        parser.add_argument("--out", type=str, default="runs", help="folder in which each run gets its own")
        parser.add_argument(
            "--name", type=str | None, default=None, help="the run's name; made from its options if not given"
        )
        parser.add_argument(
            "--logger", type=Literal["csv", "wandb"], default="csv", help="metrics.csv is always written"
        )
        parser.add_argument(
            "--log_checkpoints", type=bool, default=False, help="upload the weights of best and last to W&B after fit"
        )
        parser.add_argument(
            "--save_every_minutes", type=float, default=5.0, help="how often last.ckpt is saved inside an epoch"
        )
        parser.add_argument(
            "--save_every_n_steps", type=int | None, default=None, help="save last.ckpt also at every so many steps"
        )
        stages = [config.to_dict() for config in TWO_STAGES]
        parser.set_defaults({"model.loss": DEFAULT_LOSS, "model.stages": stages})
        parser.link_arguments("data.schema", "model.schema", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the checkpoint's config has been read before the command line (`arguments.from_checkpoint`)."""

    def before_instantiate_classes(self) -> None:
        """Refuse what cannot be done before any data are read."""
        options = self.config[self.subcommand]
        if options.log_checkpoints and options.logger != "wandb":
            raise ValueError("--log_checkpoints uploads to W&B; add --logger wandb")
        if self.resumption is not None:
            for line in check_changes(self.resumption, yaml.safe_load(self._parser("fit").whole(options))):
                warn(f"recsys-topk: {line}")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the run's directory, loggers and callbacks."""
        options = self.config[self.subcommand]
        if options.ckpt_path is not None:
            check_schema(options.ckpt_path, read_checkpoint(options.ckpt_path), self.model.schema)
        if self.resumption is not None:
            self.run = self.resumption.run
            options.ckpt_path = None  # for config.yaml: run again from it, the run begins at its beginning
        else:
            name = options.name or run_name(self.model, self.datamodule, options.seed_everything)
            name = name if self.subcommand == "fit" else f"{self.subcommand}-{name}"
            self.run = RunDirectory(Path(options.out), name)
        wanted = self._get(self.config_init, "trainer")
        if wanted.get("logger") in (None, True):
            kwargs["logger"] = self.loggers(options.logger)
        kwargs["default_root_dir"] = str(self.run.path)
        given = wanted.get("callbacks") or []
        kwargs["callbacks"] = [*(given if isinstance(given, list) else [given]), *self.callbacks()]
        plugins = wanted.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, WholeFileIO()]
        trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
        return trainer

    def loggers(self, kind: str) -> list[Logger]:
        """Return the loggers: CSV always, W&B too if asked for (offline without a key, so that nothing prompts)."""
        done = self.resumption.steps if self.resumption is not None and first_process() else None
        made: list[Logger] = [MetricsFile(self.run.path, keep_before=done)]
        if kind == "wandb":
            made.append(make_wandb(self.run))
        return made

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that every run has."""
        wanted = self._get(self.config_init, "trainer")
        options = self.config[self.subcommand]
        shows = wanted.get("enable_progress_bar") is not False
        pace = Pace(every=1.0 if shows else None)
        made: list[Callback] = [pace]
        if shows:
            made.append(RichProgress(pace) if sys.stdout.isatty() else PlainProgress(pace, echo))
        if self.subcommand == "fit" and wanted.get("enable_checkpointing") is not False:
            folder = self.run.path / "checkpoints"
            if wanted.get("limit_val_batches") != 0:
                made.append(BestCheckpoint(folder, f"val/{self.model.monitor}"))
            made.append(ResumePoint(folder, options.save_every_minutes, options.save_every_n_steps))
        if self.subcommand == "predict":
            made.append(PredictionWriter(self.run.path / "predictions.parquet"))
        return made

    def run_command(self) -> None:
        """Run the command that the arguments named."""
        self.execute = True
        self._run_subcommand(self.subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        if not self.execute:
            return
        if subcommand != "fit":
            self._measure(subcommand)
            report_end(self)
            return
        self.run.claim()
        self.run.record(status="running", **(remember(self.run.path) if first_process() else {}))
        for logger in wandb_loggers(self.trainer.loggers):
            self.run.record(wandb_id=logger.version)
        announce(self)
        status: Status = "failed"
        try:
            self.trainer.fit(**self._prepare_subcommand_kwargs(subcommand))
            status = "finished"
        except (TrainingStoppedError, SystemExit) as stop:
            if not self.trainer.interrupted:
                raise
            status = "interrupted"
            report_stop(self)
            number = stop.signal_number if isinstance(stop, TrainingStoppedError) else signal.SIGINT
            if number == signal.SIGTERM and "WANDB_SWEEP_ID" in os.environ:
                # Early termination: a W&B agent takes any status above 0 for a failure, and gives up after a few.
                raise SystemExit(0) from None
            raise (KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)) from None
        except RuntimeError as error:
            _complain_of_weights(error)
            raise
        finally:
            self.run.record(status=status, steps=self.trainer.global_step, epochs=self.trainer.current_epoch)
            self.run.release()
        report_end(self)

    def _measure(self, subcommand: str) -> None:
        announce(self)
        quietly = {"return_predictions": False} if subcommand == "predict" else {"verbose": False}
        checkpoint = self.config[subcommand].ckpt_path
        try:
            getattr(self.trainer, subcommand)(self.model, datamodule=self.datamodule, ckpt_path=checkpoint, **quietly)
        except SystemExit:
            raise (KeyboardInterrupt if self.trainer.interrupted else SystemExit(1)) from None
        except RuntimeError as error:
            _complain_of_weights(error)
            raise


@guarded()
def run_cli(arguments: list[str], resumption: Resumption | None = None, execute: bool = True) -> CascadeCLI:
    """Parse and run arguments that `recsys_topk.runs.config.rewrite` has prepared; see `CascadeCLI`."""
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
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS,
            load_from_checkpoint_support=False,
            auto_configure_optimizers=False,
            resumption=resumption,
            execute=execute,
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


def _complain_of_weights(error: RuntimeError) -> None:
    """Raise an error of one line if weights do not fit the model."""
    if "loading state_dict" in str(error):
        first = " ".join(str(error).split("\n\t")[1:2])
        raise ValueError(
            f"the checkpoint's weights do not fit this model; give the options it was trained with. {first}"
        ) from error
