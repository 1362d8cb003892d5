"""LightningCLI as the one place where a config becomes a model, data and a trainer."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import yaml
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import StrategyRegistry

from recsys_topk.callbacks.predictions import PredictionWriter
from recsys_topk.callbacks.progress import Pace, PlainProgress, RichProgress
from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint, WholeFileIO
from recsys_topk.cascades.default_stages import default_stages
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import tables_on_meta
from recsys_topk.datamodules import CascadeDataModule
from recsys_topk.files import write_whole
from recsys_topk.losses.base import RankingLoss
from recsys_topk.registry import suggest
from recsys_topk.runs.checkpoint import check_is_file, check_schema, read_checkpoint
from recsys_topk.runs.config import KEYS, as_list, resolve
from recsys_topk.runs.directory import WANDB_OPTIONS, RunDirectory, check_name, first_process, run_name
from recsys_topk.runs.memory import keep_freed_memory
from recsys_topk.runs.metrics_file import MetricsFile
from recsys_topk.runs.parser_errors import plain_error
from recsys_topk.runs.preflight import check_hardware, check_monitors
from recsys_topk.runs.quiet import quiet_libraries
from recsys_topk.runs.resume import Resumption, check_changes
from recsys_topk.runs.table_memory import announce_memory
from recsys_topk.runs.wandb.logger import describe_run, make_wandb, wandb_loggers
from recsys_topk.strategies.torchrec import TorchRecStrategy
from recsys_topk.trust import UntrustedError, what_to_trust

if TYPE_CHECKING:
    from recsys_topk.runs.run import Command, LogLine

TorchRecStrategy.register_strategies(StrategyRegistry)
TRAINER_DEFAULTS = {
    "max_epochs": 1,
    "log_every_n_steps": 10,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
}
# What a run takes besides LightningCLI's options: type, default, help.
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "out": (str, "runs", "folder in which each run gets its own"),
    "name": (str | None, None, "the run's name; made from its options if not given"),
    "logger": (Literal["csv", "wandb"], "csv", "metrics.csv is always written"),
    "log_checkpoints": (bool, False, "upload the weights of best and last to W&B after fit"),
    "baselines": (bool, True, "measure random order and popularity beside the result"),
    "save_every_minutes": (float, 5.0, "how often last.ckpt is saved inside an epoch"),
    "save_every_n_steps": (int | None, None, "save last.ckpt also at every so many steps"),
    **{f"wandb.{name}": (str | None, None, f"{name} of the W&B run") for name in WANDB_OPTIONS},
    "wandb.tags": (list[str] | str | None, None, "tags of the W&B run, with commas between"),
    "wandb.mode": (Literal["online", "offline", "disabled"] | None, None, "disabled: no W&B run"),
}


# Called with the schema, the number of stages and the model's options before tables are allocated. The link from data
# to model could call it too, but jsonargparse puts the repr of the whole schema into the message of what it raises.
_BEFORE_BUILDING: ContextVar[Callable[[Any, int, Mapping[str, Any]], None] | None] = ContextVar(
    "before_building", default=None
)


def cascade(
    schema: Any,
    loss: RankingLoss,
    stages: list[StageConfig] | None = None,
    objective: Callable[[RankingLoss, int], CascadeObjective] | None = None,
    **options: Any,
) -> CascadeModule:
    """Build the module.

    Args:
        schema: The features; taken from the data.
        loss: The loss; `--loss NAME` for short.
        stages: The stages, first to last; None = what the features of the data can feed.
        objective: How the stages are trained together; `--objective NAME` for short.
        options: As those of `CascadeModule`.
    """
    before = _BEFORE_BUILDING.get()
    if before is not None:
        before(schema, len(default_stages(schema.outline) if stages is None else stages), options)
    return CascadeModule(schema, stages=stages, loss=loss, objective=objective, **options)


class SaveConfig(SaveConfigCallback):  # type: ignore[misc]  # lightning is untyped here
    """Saves the configuration as config.yaml, and as the config of the W&B run if there is one."""

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the whole resolved configuration once, the file whole or not at all."""
        text = as_yaml(self.parser, self.config)
        write_whole(Path(trainer.default_root_dir) / "config.yaml", f"# lightning.pytorch=={pl.__version__}\n{text}")
        for logger in wandb_loggers(trainer.loggers):
            # The plain names, because a class path depends on how the loss was chosen.
            trained = pl_module.loss.name if pl_module.objective.uses_loss else pl_module.objective.name
            names = {"loss": trained, "objective": pl_module.objective.name, "monitor": pl_module.monitor}
            recalls = [f"val/{name}" for name in pl_module.metrics["val"]]
            describe_run(logger, {**yaml.safe_load(text), **names}, recalls)


class CascadeCLI(LightningCLI):  # type: ignore[misc]  # lightning is untyped here
    """The parts of a run, from a config: trainer, model and data, with a directory, loggers and callbacks.

    Args:
        command: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        config: The config; see `recsys_topk.runs.config`.
        resumption: The run to resume; None = a new one.
        log_line: Takes one line of text for people at a time.
        build: Build the parts; otherwise only check the config and fill in its defaults.

    Attributes:
        directory: Where the run writes.
    """

    directory: RunDirectory

    def __init__(
        self,
        command: Command,
        config: Mapping[str, Any],
        resumption: Resumption | None = None,
        log_line: LogLine = lambda text: None,
        build: bool = True,
    ) -> None:
        quiet_libraries()
        keep_freed_memory()
        self.command, self.resumption, self.log_line, self.build = command, resumption, log_line, build
        try:
            super().__init__(
                cascade,
                CascadeDataModule,
                args={"subcommand": command, command: resolve(config)},
                subclass_mode_data=True,
                parser_kwargs={"exit_on_error": False},
                seed_everything_default=42,
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults=TRAINER_DEFAULTS,
                load_from_checkpoint_support=False,
                auto_configure_optimizers=False,
            )
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error

    def subcommands(self) -> dict[str, set[str]]:
        """Return the command of this run alone: each parser takes a tenth of a second to build."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    @property
    def options(self) -> dict[str, Any]:
        """All options, those left at their defaults too."""
        return dict(yaml.safe_load(as_yaml(self._parser(self.command), self.config[self.command])))

    @property
    def checkpoint_options(self) -> dict[str, Any]:
        """What the trainer's methods take to load the checkpoint: the file that was checked, safely unpickled.

        The path is absolute because Lightning downloads what begins with "http" and knows words such as "last".
        `weights_only` is what the user typed; a file cannot set it.
        """
        options = self.config_init[self.command]
        path, safe = options.get("ckpt_path"), options.get("weights_only")
        return {"ckpt_path": path and str(Path(path).resolve()), "weights_only": True if safe is None else safe}

    def help(self) -> str:
        """Return the help on every option."""
        return str(self._parser(self.command).format_help())

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of a run to those of LightningCLI."""
        for name, (kind, default, text) in OPTIONS.items():
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        parser.link_arguments("data.schema", "model.schema", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Check the config; an error is one line, with the nearest option where one is misspelt."""
        try:
            self.config = parser.parse_object(args)
        except argparse.ArgumentError as error:
            text = " ".join(str(error).split())
            denied = re.search(r"Importing '([\w.]+)' is not allowed, denied by", text)
            implied = denied and what_to_trust(denied[1]) == denied[1]  # the base class of what is expected
            if denied and implied and not re.search(rf"\b{denied[1].rpartition('.')[2]}\b", str(args)):
                raise ValueError(
                    f"class_path is missing where a {denied[1]} is expected; write "
                    "{class_path: ..., init_args: {...}}"
                ) from error
            if denied:
                raise UntrustedError(
                    f"an option or a config names {denied[1]!r}, which a file may not name; nothing of it was "
                    f"imported. If you know the package, add --trust {what_to_trust(denied[1])}"
                ) from error
            unknown = re.search(r"not accept option '([\w.+-]+)'", text)
            if not unknown:
                raise ValueError(plain_error(text)) from error
            known = [option for action in self._parser(self.command)._actions for option in action.option_strings]
            option = f"--{unknown.group(1)}"
            close = suggest(option, [*known, "--resume", *(f"--{key}" for key in (*KEYS, "lr_scheduler"))], "{}")
            raise ValueError(f"{self.command} has no option {option}; {close}--help_all lists them") from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing: `TrainingRun` has read the checkpoint's config."""

    def _set_seed(self) -> None:
        if self.build:
            super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Refuse what cannot be done, before any data are read."""
        options = self.config[self.command]
        if options.log_checkpoints and options.logger != "wandb":
            raise ValueError("--log_checkpoints uploads to W&B; add --logger wandb")
        if options.name is not None:
            check_name(options.name)
        if options.ckpt_path is not None:
            check_is_file(options.ckpt_path)
        if self.build:
            check_hardware(vars(options.trainer))
        if self.resumption is not None:
            then = CascadeCLI("fit", self.resumption.config, build=False).options
            for line in check_changes(self.resumption, then, self.options):
                self.log_line(line)

    def instantiate_classes(self) -> None:
        """Build the parts, unless only the config was asked for."""
        if self.build:
            strategy = self.config[self.command].trainer.strategy
            on_meta = bool(getattr(getattr(strategy, "init_args", None), "tables_on_meta", False))
            token = _BEFORE_BUILDING.set(self._check_memory if self.command == "fit" else None)
            try:
                with tables_on_meta(on_meta):
                    super().instantiate_classes()
            except ValueError as error:
                raise ValueError(plain_error(str(error))) from error
            finally:
                _BEFORE_BUILDING.reset(token)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the run's directory, loggers and callbacks."""
        options = self.config[self.command]
        wanted = self._get(self.config_init, "trainer")
        check_monitors(as_list(wanted.get("callbacks")), self.model)
        if options.model.stages is None:  # config.yaml names the stages, whatever later versions choose by themselves
            options.model.stages = [config.to_dict() for config in self.model.cascade.configs]
        if options.ckpt_path is not None:
            check_schema(options.ckpt_path, read_checkpoint(options.ckpt_path), self.model.schema)
        if self.resumption is not None:
            self.directory = self.resumption.run
            options.ckpt_path = None  # for config.yaml: run again from it, the run begins at its beginning
        else:
            name = options.name or run_name(self.model, self.datamodule, options.seed_everything)
            name = name if self.command == "fit" else f"{self.command}-{name}"
            self.directory = RunDirectory(Path(options.out), name)
        if wanted.get("logger") in (None, True):
            kwargs["logger"] = self.loggers(options.logger)
        kwargs["default_root_dir"] = str(self.directory.path)
        kwargs["callbacks"] = [*as_list(wanted.get("callbacks")), *self.callbacks()]
        plugins = as_list(wanted.get("plugins"))
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, WholeFileIO()]
        try:
            trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            self.directory.discard()
            raise (ValueError(str(error)) if isinstance(error, TypeError) else error) from error
        return trainer

    def _check_memory(self, schema: Any, stages: int, options: Mapping[str, Any]) -> None:
        """Log the memory of the tables; raise if the machine does not have it."""
        trainer = self.config[self.command].trainer
        for line in announce_memory(schema, stages, options, str(trainer.accelerator), trainer.strategy):
            self.log_line(line)

    def loggers(self, kind: str) -> list[Logger]:
        """Return the loggers: CSV always, W&B too if asked for (offline without a key, so that nothing prompts)."""
        done = self.resumption.steps if self.resumption is not None and first_process() else None
        made: list[Logger] = [MetricsFile(self.directory.path, keep_before=done)]
        options = self.config[self.command]
        if kind == "wandb" and options.wandb.mode != "disabled":
            made.append(make_wandb(self.directory, vars(options.wandb), self.command, options.ckpt_path))
        return made

    def callbacks(self) -> list[Callback]:
        """Return the callbacks that every run has."""
        wanted = self._get(self.config_init, "trainer")
        options = self.config[self.command]
        shows = wanted.get("enable_progress_bar") is not False
        pace = Pace(every=1.0 if shows else None)
        made: list[Callback] = [pace]
        if shows:
            made.append(RichProgress(pace) if sys.stdout.isatty() else PlainProgress(pace, self.log_line))
        if self.command == "fit" and wanted.get("enable_checkpointing") is not False:
            folder = self.directory.path / "checkpoints"
            if wanted.get("limit_val_batches") != 0 and self.datamodule.splits["val"]:
                made.append(BestCheckpoint(folder, f"val/{self.model.monitor}"))
            made.append(ResumePoint(folder, options.save_every_minutes, options.save_every_n_steps))
        if self.command == "predict":
            made.append(PredictionWriter(self.directory.path / "predictions.parquet"))
        return made

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: `TrainingRun` runs it."""


def as_yaml(parser: LightningArgumentParser, options: Any) -> str:
    """Return all options as YAML, unset ones too."""
    return str(parser.dump(options, "yaml", False))  # by position: the keyword's name depends on the version
