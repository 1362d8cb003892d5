"""LightningCLI builds the parts of a run from its parsed config: data, model and trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import yaml
from jsonargparse import Namespace
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger

from recsys_topk.callbacks.predictions import PredictionWriter
from recsys_topk.callbacks.progress import Pace, Progress
from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint, WholeFileIO
from recsys_topk.cascades.default_stages import default_stages
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import tables_on_meta
from recsys_topk.datamodules import CascadeDataModule, Schema
from recsys_topk.evaluation.corpus_metrics import CorpusMetrics, corpus_options
from recsys_topk.files import write_whole
from recsys_topk.runs.agreement import SameOptions, check_port
from recsys_topk.runs.checkpoint import check_schema, read_checkpoint
from recsys_topk.runs.config import as_list
from recsys_topk.runs.directory import RunDirectory, first_process, name_of_run, run_name
from recsys_topk.runs.libraries import keep_freed_memory
from recsys_topk.runs.metrics_file import MetricsFile
from recsys_topk.runs.parser import as_dict, as_yaml, cascade, plain_error
from recsys_topk.runs.preflight import announce_memory, check_monitors
from recsys_topk.runs.resume import Resumption
from recsys_topk.runs.wandb.logger import PROJECT, describe_run, make_wandb, wandb_loggers

if TYPE_CHECKING:
    from recsys_topk.runs.run import Command, LogLine


class SaveConfig(SaveConfigCallback):  # type: ignore[misc]  # lightning is untyped here
    """Saves the config as config.yaml, and as the config of the W&B run if there is one."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write all options to one file, atomically."""
        text = as_yaml(self.parser, self.config)
        write_whole(Path(trainer.default_root_dir) / "config.yaml", f"# lightning.pytorch=={pl.__version__}\n{text}")
        for logger in wandb_loggers(trainer.loggers):
            # Plain names, because a class path depends on how the loss was chosen.
            trained = pl_module.loss.name if pl_module.objective.uses_loss else pl_module.objective.name
            names = {"loss": trained, "objective": pl_module.objective.name, "monitor": pl_module.monitor}
            recalls = [f"val/{name}" for name in pl_module.metrics["val"]]
            describe_run(logger, {**yaml.safe_load(text), **names}, recalls)


class CascadeCLI(LightningCLI):  # type: ignore[misc]  # lightning is untyped here
    """Trainer, model and data of a run, from its parsed config, with its directory, loggers and callbacks."""

    directory: RunDirectory

    def __init__(
        self,
        command: Command,
        parser: LightningArgumentParser,
        config: Namespace,
        resumption: Resumption | None,
        log_line: LogLine,
    ) -> None:
        keep_freed_memory()
        self.command, self.resumption, self.log_line = command, resumption, log_line
        self.parsed_by = parser
        try:
            super().__init__(
                cascade,
                CascadeDataModule,
                args=config,
                run=False,
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                load_from_checkpoint_support=False,
                auto_configure_optimizers=False,
            )
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error

    def setup_parser(self, *_: Any) -> None:
        """Take the parser of the config."""
        self.parser = self.parsed_by

    def parse_arguments(self, parser: LightningArgumentParser, args: Namespace) -> None:
        """Take the parsed config."""
        self.config = args

    @property
    def options(self) -> dict[str, Any]:
        """All options as plain values, with defaults."""
        return as_dict(self.parser, self.config)

    @property
    def checkpoint_options(self) -> dict[str, Any]:
        """The arguments of the trainer's methods that load the checkpoint: the checked file, unpickled safely.

        The path is absolute, because Lightning downloads paths that begin with "http" and interprets words such as
        "last". `weights_only` is what the user typed; a file cannot set it.
        """
        path, safe = self.config_init.ckpt_path, self.config_init.weights_only
        return {"ckpt_path": path and str(Path(path).resolve()), "weights_only": True if safe is None else safe}

    def instantiate_classes(self) -> None:
        """Build data, model and trainer."""
        strategy = self.config.trainer.strategy
        on_meta = bool(getattr(getattr(strategy, "init_args", None), "tables_on_meta", False))
        try:
            with tables_on_meta(on_meta):
                build_module = (self._build_module, CascadeModule, True)
                self.config_init = self.parser.instantiate(self.config, instantiators=[build_module])
                self.datamodule, self.model = self.config_init.data, self.config_init.model
                self.trainer = self.instantiate_trainer()
        except ValueError as error:
            raise ValueError(plain_error(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the directory, the loggers and the callbacks of the run."""
        options, wanted = self.config, self.config_init.trainer
        check_monitors(as_list(wanted.callbacks), self.model)
        if options.model.stages is None:  # config.yaml names the stages, because later versions may choose others
            options.model.stages = [config.to_dict() for config in self.model.cascade.configs]
        if options.ckpt_path is not None:
            check_schema(options.ckpt_path, read_checkpoint(options.ckpt_path), self.model.schema)
        if self.resumption is not None:
            self.directory = self.resumption.run
            options.ckpt_path = None  # in config.yaml: a new run from it starts at the first step
        else:
            if self.command == "fit":
                name = options.name or run_name(self.model, self.datamodule, options.seed_everything)
            else:
                name = f"{self.command}-{options.name or name_of_run(options.ckpt_path)}"
            self.directory = RunDirectory(Path(options.out), name)
            if self.directory.path.name != name:
                self.log_line(
                    f"NOTE: {Path(options.out) / name} exists already; this run goes to {self.directory.path}"
                )
        if wanted.logger in (None, True):
            kwargs["logger"] = self.loggers()
        kwargs["default_root_dir"] = str(self.directory.path)
        kwargs["callbacks"] = [*as_list(wanted.callbacks), *self.callbacks()]
        plugins = as_list(wanted.plugins)
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, WholeFileIO()]
        try:
            trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
            check_port(trainer.world_size)
        except (MisconfigurationException, TypeError, ValueError) as error:
            self.directory.discard()
            raise (ValueError(str(error)) if isinstance(error, TypeError) else error) from error
        return trainer

    def _build_module(
        self, cls: type[CascadeModule], *, schema: Schema, stages: list[StageConfig] | None, **options: Any
    ) -> CascadeModule:
        """Build the model. Before its tables are allocated, log their size and raise if the machine is too small."""
        if self.command == "fit":
            trainer = self.config.trainer
            chosen = (
                [*default_stages(schema.outline)] if stages is None else [StageConfig.of(stage) for stage in stages]
            )
            for line in announce_memory(schema, chosen, options, str(trainer.accelerator), trainer.strategy):
                self.log_line(line)
        return cls(schema=schema, stages=stages, **options)

    def loggers(self) -> list[Logger]:
        """Return the CSV logger and the configured one. W&B without a key is offline and never prompts."""
        options = self.config
        done = self.resumption.steps if self.resumption is not None and first_process() else None
        loggers: list[Logger] = [MetricsFile(self.directory.path, keep_before=done)]
        if options.logger == "wandb" and options.wandb.mode != "disabled":
            loggers.append(make_wandb(self.directory, vars(options.wandb), self.command, options.ckpt_path))
        elif options.logger == "mlflow":  # where: MLFLOW_TRACKING_URI, or the folder mlruns
            loggers.append(MLFlowLogger(experiment_name=PROJECT, run_name=self.directory.path.name))
        elif options.logger == "tensorboard":
            loggers.append(TensorBoardLogger(self.directory.path, name="", version="tensorboard"))
        return loggers

    def callbacks(self) -> list[Callback]:
        """Return the callbacks of every run."""
        options, wanted = self.config, self.config_init.trainer
        shows = wanted.enable_progress_bar is not False
        pace = Pace(every=1.0 if shows else None)
        callbacks: list[Callback] = [pace, SameOptions(self.options)]
        if shows:
            callbacks.append(Progress(pace, self.log_line, terminal=sys.stdout.isatty()))
        if self.command == "fit" and self.model.monitor.endswith("/corpus"):
            callbacks.append(CorpusMetrics(**{**corpus_options(self.model.monitor), "baselines": ["popularity"]}))
        if self.command == "fit" and wanted.enable_checkpointing is not False:
            folder = self.directory.path / "checkpoints"
            if wanted.limit_val_batches != 0 and self.datamodule.splits["val"]:
                callbacks.append(BestCheckpoint(folder, f"val/{self.model.monitor}"))
            callbacks.append(ResumePoint(folder, options.save_every_minutes, options.save_every_n_steps))
        if self.command == "predict":
            callbacks.append(PredictionWriter(self.directory.path / "predictions.parquet"))
        return callbacks
