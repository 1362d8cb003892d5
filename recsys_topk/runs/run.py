"""`TrainingRun`: a config in, a trained and measured cascade out."""

from __future__ import annotations

import builtins
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from recsys_topk.runs.checkpoint import (
    config_from_checkpoint,
    describe_checkpoint,
    hiding_content,
    read_checkpoint,
    weights_fit,
)
from recsys_topk.runs.config import as_list, as_options, flatten_config, resolve, typed_options
from recsys_topk.runs.directory import RunDirectory, Status, first_process
from recsys_topk.runs.resume import LONGER, Resumption, check_changes, plan_resumption
from recsys_topk.runs.wandb.environment import with_wandb_environment
from recsys_topk.trust import reading
from recsys_topk.trust.own_runs import remember
from recsys_topk.trust.typed import trusted_by

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from recsys_topk.runs.lightning_cli import CascadeCLI

Command: TypeAlias = Literal["fit", "validate", "test", "predict"]
LogLine: TypeAlias = Callable[[str], None]

# Errors in the input rather than in the program. The command line shows them as one line.
INPUT_ERRORS = (ValueError, OSError, ImportError)

log = logging.getLogger(__name__)


class TrainingRun:
    """A training run: its directory, model, data and trainer, from a config.

    The parts are built on first use. After `fit`, the other methods measure the trained weights in the same directory.
    Without `fit`, they load the weights, the model and the data of `ckpt_path` and create a directory.

    Args:
        config: The config; see `recsys_topk.runs.config`. Every option has a default.
        resume: The run to resume: ``"last"`` for the newest unfinished run in `out`, a run directory or its name, or a
            checkpoint in a run directory. The options of the run are restored; `config` may extend the training.
        trust: Packages whose classes a config file, checkpoint or run directory may name, e.g. ``["my_package"]``; see
            `recsys_topk.trust`. The packages of classes that `config` names itself are trusted.
        log_line: Called with one line of text at a time; by default the lines are logged, and in a notebook printed.

    Example::

        run = TrainingRun({"loss": "dftopk", "data": {"root": "path/to/recflow"}, "trainer": {"max_epochs": 2}})
        run.fit()
        recalls = run.test()
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        resume: str | Path | None = None,
        trust: Sequence[str] = (),
        log_line: LogLine | None = None,
    ) -> None:
        if log_line is None:
            log_line = _print_line if hasattr(builtins, "__IPYTHON__") else log.info
        # Typed options override the environment, which overrides files.
        self.config = with_wandb_environment(config)
        self.trust = (*trust, *trusted_by(config))
        self.started = time.monotonic()
        self.log_line: LogLine = log_line if first_process() else lambda text: None
        self.resumption: Resumption | None = None
        self._parts: CascadeCLI | None = None
        if resume is not None:
            if config.get("ckpt_path") is not None:
                raise ValueError("--resume selects the checkpoint; leave --ckpt_path out")
            with reading(self.trust):
                self.resumption = plan_resumption(str(resume), Path(config.get("out") or "runs"), config.get("name"))
            self.trust = (*self.trust, *self.resumption.trust)

    @property
    def finished_message(self) -> str | None:
        """A message if the run to resume has finished and is not extended; otherwise None."""
        resumption, trainer = self.resumption, self.config.get("trainer") or {}
        if resumption is None or not resumption.finished or any(trainer.get(name) is not None for name in LONGER):
            return None
        return (
            f"the run in {resumption.run.path} has finished ({resumption.epochs} epochs, {resumption.steps} steps); to "
            f"continue training, give --trainer.max_epochs N with a larger N"
        )

    @property
    def trainer(self) -> pl.Trainer:
        """Lightning's trainer."""
        return self.parts().trainer

    @property
    def model(self) -> Any:
        """The `CascadeModule`."""
        return self.parts().model

    @property
    def data(self) -> Any:
        """The data module."""
        return self.parts().datamodule

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run."""
        return self.parts().directory

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric."""
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def typed(self, command: Command) -> str | None:
        """Return the command line of this config; None if it has parts that cannot be typed."""
        values = [value for given in flatten_config(self.config).values() for value in as_list(given)]
        if any(isinstance(value, Mapping) for value in values):
            return None
        resumed = [] if self.resumption is None else ["--resume", str(self.resumption.run.path)]
        return shlex.join(["recsys-topk", command, *resumed, *as_options(self.config)])

    def options(self, command: Command = "fit") -> dict[str, Any]:
        """Return the whole config with defaults; raise on a mistake. Nothing is built."""
        with self._parsed(command, self._resolve(command)[0]) as (parser, values):
            from recsys_topk.runs.parser import as_dict

            return as_dict(parser, values)

    def parts(self, command: Command = "fit") -> CascadeCLI:
        """Return trainer, model and data. The first call builds them."""
        if self._parts is None:
            config, lines = self._resolve(command)
            for line in lines:
                self.log_line(line)
            with self._parsed(command, config) as (parser, values):
                from recsys_topk.runs.lightning_cli import CascadeCLI
                from recsys_topk.runs.preflight import check_hardware

                check_hardware(vars(values.trainer))
                with hiding_content(self._named_data(command)):
                    self._parts = CascadeCLI(command, parser, values, self.resumption, self.log_line)
        return self._parts

    def fit(self) -> dict[str, float]:
        """Train; return the newest metrics.

        Raises:
            KeyboardInterrupt: If training was interrupted; `resume` continues from ``last.ckpt``. SIGTERM raises
                SystemExit.
        """
        parts = self.parts("fit")

        from recsys_topk.callbacks.resume_point import TrainingStoppedError
        from recsys_topk.runs.lost_process import watch_processes
        from recsys_topk.runs.summary import report_end, report_start, report_stop
        from recsys_topk.runs.wandb.lineage import run_facts
        from recsys_topk.runs.wandb.logger import wandb_loggers

        self.directory.claim()
        status: Status = "failed"
        refused = False
        try:
            trusted = remember(self.directory.path, self.trust) if first_process() else {}
            self.directory.record(status="running", monitor=self.model.monitor, **trusted)
            for logger in wandb_loggers(self.trainer.loggers):
                self.directory.record(**run_facts(logger))
            report_start(self, "fit")
            with weights_fit(), watch_processes(self):
                self.trainer.fit(self.model, datamodule=self.data, **parts.checkpoint_options)
            status = "finished"
        except (TrainingStoppedError, SystemExit) as stop:
            if not self.trainer.interrupted:
                raise
            status = "interrupted"
            report_stop(self)
            number = stop.signal_number if isinstance(stop, TrainingStoppedError) else signal.SIGINT
            if number == signal.SIGTERM and "WANDB_SWEEP_ID" in os.environ:
                # Early termination: a W&B agent treats any other status as a failure, and stops after a few.
                raise SystemExit(0) from None
            raise (KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)) from None
        except INPUT_ERRORS:
            refused = self.trainer.global_step == 0
            raise
        finally:
            if refused:
                self.directory.discard()
            else:
                self.directory.record(status=status, steps=self.trainer.global_step, epochs=self.trainer.current_epoch)
            self.directory.release()
        report_end(self, "fit")
        return self.metrics

    def validate(self, corpus: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Measure on the validation days; return the metrics. `corpus` as in `test`."""
        return self._measure("validate", corpus)

    def test(self, corpus: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Measure on the test days; return the metrics.

        Args:
            corpus: Also measure over the whole catalogue and write ``corpus.json``: options of
                `recsys_topk.evaluation.CorpusMetrics`, e.g. ``{"cuts": [10, 20]}`` or ``{}``; None = no.
                ``{"index": FOLDER}`` also searches an index, ``"export"`` names the export that it was built for.
                ``{"baselines": {"als": {"factors": 32}}}`` measures baselines too.
        """
        return self._measure("test", corpus)

    def predict(self) -> Path:
        """Write scores, rank and dropping stage of every candidate of the test days; return the Parquet file."""
        self._measure("predict")
        return self.directory.path / "predictions.parquet"

    def _measure(self, command: Command, corpus: Mapping[str, Any] | None = None) -> dict[str, float]:
        separate = self.parts(command).command != "fit"

        from recsys_topk.runs.summary import report_end, report_start

        quietly = {"return_predictions": False} if command == "predict" else {"verbose": False}
        loading = self.parts().checkpoint_options if separate else {}
        try:
            if separate:
                report_start(self, command)
            with weights_fit(), self._whole_catalogue(corpus):
                getattr(self.trainer, command)(self.model, datamodule=self.data, **loading, **quietly)
        except SystemExit:
            raise (KeyboardInterrupt if self.trainer.interrupted else SystemExit(1)) from None
        except INPUT_ERRORS:
            if separate:
                self.directory.discard()
            raise
        report_end(self, command)
        return self.metrics

    @contextmanager
    def _whole_catalogue(self, options: Mapping[str, Any] | None) -> Iterator[None]:
        """Add the callback that measures over the whole catalogue, if there are options for it."""
        if options is None:
            yield
            return
        from recsys_topk.evaluation.corpus_metrics import CorpusMetrics

        options = dict(options)
        index, export = options.pop("index", None), options.pop("export", None)
        if isinstance(options.get("baselines"), Mapping):
            from recsys_topk.evaluation.baselines import make_baselines

            options["baselines"] = make_baselines(options["baselines"])
        if index is not None:
            from recsys_topk.evaluation.index_search import IndexedCatalogue

            options["searches"] = {"index": IndexedCatalogue(index, export, self.data)}
        callback = CorpusMetrics(**options, log_line=self.log_line, file=self.directory.path / "corpus.json")
        self.trainer.callbacks.append(callback)
        try:
            yield
        finally:
            self.trainer.callbacks.remove(callback)

    def _named_data(self, command: Command) -> Mapping[str, Any]:
        """Return the options of the data that a checkpoint or a run directory names, without those that were typed."""
        named: Mapping[str, Any] = {}
        if self.resumption is not None:
            named = self.resumption.config
        elif command != "fit":
            named = config_from_checkpoint(read_checkpoint(self.config["ckpt_path"]))
        typed = flatten_config({"data": typed_options(self.config).get("data") or {}})
        options = flatten_config({"data": named.get("data") or {}})
        return {key: value for key, value in options.items() if key not in typed}

    def _resolve(self, command: Command) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the config in its long form, and lines that say what is restored.

        It is merged from the run to resume or the checkpoint, files, environment and typed options, lowest first.
        """
        config: Mapping[str, Any] = self.config
        lines: Sequence[str] = ()
        with reading(self.trust):
            if self.resumption is not None:
                lines = self.resumption.lines
                config = {"config": [self.resumption.config, config], "ckpt_path": str(self.resumption.checkpoint)}
            elif command != "fit":
                checkpoint = config.get("ckpt_path")
                if not checkpoint:
                    example = f"recsys-topk {command} --ckpt_path runs/NAME/checkpoints/best.ckpt"
                    raise ValueError(f"{command} needs a trained model: {example}")
                content = read_checkpoint(checkpoint)
                lines = describe_checkpoint(checkpoint, content)
                config = {"config": [config_from_checkpoint(content), config]}
            resolved, typed = resolve(config), typed_options(self.config)
        wandb = dict(resolved.get("wandb") or {})
        if resolved.get("logger") == "wandb" and typed.get("logger") != "wandb" and wandb.get("mode") is None:
            resolved["wandb"] = {**wandb, "mode": "offline"}
            lines = [*lines, "W&B is offline, because a file chose it; --logger wandb sends the run to the server"]
        return resolved, lines

    @contextmanager
    def _parsed(self, command: Command, config: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Parse a resolved config; yield the parser and the options. Inside, only trusted classes are imported."""
        with reading(self.trust):
            from recsys_topk.runs.libraries import quiet_libraries
            from recsys_topk.runs.parser import as_dict, make_parser, parse
            from recsys_topk.runs.preflight import check_options
            from recsys_topk.trust.guard import guarded

            quiet_libraries()
            with guarded():
                parser = make_parser()
                values = parse(parser, command, config, self.config)
                check_options(values)
                if self.resumption is not None:
                    for line in check_changes(self.resumption, config, as_dict(parser, values)):
                        self.log_line(line)
                yield parser, values


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
