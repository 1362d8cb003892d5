"""`TrainingRun`: a config in, a trained and measured cascade out."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from recsys_topk.runs.checkpoint import config_from_checkpoint, describe_checkpoint, read_checkpoint
from recsys_topk.runs.config import resolve
from recsys_topk.runs.day_check import check_days
from recsys_topk.runs.directory import RunDirectory, Status, first_process, with_wandb_environment
from recsys_topk.runs.resume import LONGER, Resumption, plan_resumption
from recsys_topk.trust import reading
from recsys_topk.trust.own_runs import remember
from recsys_topk.trust.typed import trusted_by

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from recsys_topk.runs.lightning_cli import CascadeCLI

Command: TypeAlias = Literal["fit", "validate", "test", "predict"]
LogLine: TypeAlias = Callable[[str], None]

# Errors of the user's or of the data, not of the program; the command line shows them as one line.
REFUSALS = (ValueError, OSError, ImportError)

log = logging.getLogger(__name__)


class TrainingRun:
    """One run: its directory, model, data and trainer, from a config.

    The parts are built when they are first needed. After `fit`, the other methods measure the trained weights in the
    same directory. Without it they take those of `ckpt_path`, with the model and the data of the checkpoint, and make
    their own directory.

    Args:
        config: What to train or measure; see `recsys_topk.runs.config`. Everything has a default.
        resume: Resume a run: ``"last"`` for the newest unfinished one in `out`, a run's directory or name, or a
            checkpoint inside its directory. Its options are restored; `config` may change how long it trains.
        trust: Packages whose classes a config file, checkpoint or run directory may name, e.g. ``["my_package"]``; see
            `recsys_topk.trust`. Those of the classes that `config` names itself are trusted.
        log_line: Takes one line of text for people at a time; by default it is logged.

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
        log_line: LogLine = log.info,
    ) -> None:
        # What is typed wins over the environment, and that over the files.
        self.config = with_wandb_environment(config)
        self.trust = (*trust, *trusted_by(config))
        self.log_line: LogLine = log_line if first_process() else lambda text: None
        self.resumption: Resumption | None = None
        self._parts: CascadeCLI | None = None
        if resume is not None:
            if config.get("ckpt_path") is not None:
                raise ValueError("--resume says where to resume from; leave --ckpt_path out")
            with reading(self.trust):
                self.resumption = plan_resumption(str(resume), Path(config.get("out") or "runs"), config.get("name"))
            self.trust = (*self.trust, *self.resumption.trust)

    @property
    def finished_message(self) -> str | None:
        """Why there is nothing to resume, None if there is something."""
        found = self.resumption
        if found is None or not found.finished:
            return None
        trainer = self.config.get("trainer") or {}
        if any(trainer.get(option.removeprefix("trainer.")) is not None for option in LONGER):
            return None
        return (
            f"the run in {found.run.path} has finished ({found.epochs} epochs, {found.steps} steps); nothing is left "
            f"to do. To train on, give --trainer.max_epochs N with a larger N"
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
        """Where the run writes."""
        return self.parts().directory

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every metric."""
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def options(self, command: Command = "fit") -> dict[str, Any]:
        """Return the whole config, defaults filled in; raise on a mistake. Nothing is built."""
        return self._read(command, build=False).options

    def parts(self, command: Command = "fit") -> CascadeCLI:
        """Return trainer, model and data, built at the first call."""
        if self._parts is None:
            self._parts = self._read(command, build=True)
        return self._parts

    def fit(self) -> dict[str, float]:
        """Train; return the newest metrics.

        Raises:
            KeyboardInterrupt: If it was interrupted; `resume` continues from ``last.ckpt``. SIGTERM gives a SystemExit.
        """
        parts = self.parts("fit")

        from recsys_topk.callbacks.resume_point import TrainingStoppedError
        from recsys_topk.runs.lost_process import watch_processes
        from recsys_topk.runs.summary import report_end, report_start, report_stop
        from recsys_topk.runs.wandb.lineage import run_facts
        from recsys_topk.runs.wandb.logger import wandb_loggers

        self.directory.claim()
        own = remember(self.directory.path, self.trust) if first_process() else {}
        self.directory.record(status="running", monitor=self.model.monitor, **own)
        for logger in wandb_loggers(self.trainer.loggers):
            self.directory.record(**run_facts(logger))
        status: Status = "failed"
        refused = False
        try:
            report_start(self, "fit")
            with _weights_fit(), watch_processes(self):
                self.trainer.fit(**{**parts._prepare_subcommand_kwargs("fit"), **parts.checkpoint_options})
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
        except REFUSALS:
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
            corpus: Measure over the whole catalogue too: options of `evaluation.CorpusMetrics`, e.g.
                ``{"cuts": [10, 20]}``, or ``{}``; None = no. ``{"index": FOLDER}`` measures through an index too,
                beside exact search; ``"export"`` says which export it was built for. ``{"baselines": {"als":
                {"factors": 32}}}`` measures baselines beside it. Writes ``corpus.json``.
        """
        return self._measure("test", corpus)

    def predict(self) -> Path:
        """Write every candidate's scores, fate and rank for the test days; return the Parquet file."""
        self._measure("predict")
        return self.directory.path / "predictions.parquet"

    def _measure(self, command: Command, corpus: Mapping[str, Any] | None = None) -> dict[str, float]:
        own = self.parts(command).command != "fit"

        from recsys_topk.runs.summary import report_end, report_start

        quietly = {"return_predictions": False} if command == "predict" else {"verbose": False}
        loading = self.parts().checkpoint_options if own else {}
        try:
            if own:
                report_start(self, command)
            with _weights_fit(), self._whole_catalogue(corpus):
                getattr(self.trainer, command)(self.model, datamodule=self.data, **loading, **quietly)
        except SystemExit:
            raise (KeyboardInterrupt if self.trainer.interrupted else SystemExit(1)) from None
        except REFUSALS:
            if own:
                self.directory.discard()
            raise
        report_end(self, command)
        return self.metrics

    @contextmanager
    def _whole_catalogue(self, options: Mapping[str, Any] | None) -> Iterator[None]:
        """Let the trainer measure over the whole catalogue too, if there are options for it."""
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

    def _read(self, command: Command, build: bool) -> CascadeCLI:
        with reading(self.trust):
            config, lines = self._config(command)
            if build:
                check_days(config)
            resolve(config)  # names are checked before Lightning is imported
            for line in lines if build else ():
                self.log_line(line)

            from recsys_topk.runs.lightning_cli import CascadeCLI
            from recsys_topk.trust.guard import guarded

            with guarded():
                return CascadeCLI(command, config, self.resumption, self.log_line, build)

    def _config(self, command: Command) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the config, above that of the run to resume or of the checkpoint, and lines on what is restored."""
        if self.resumption is not None:
            below, checkpoint = self.resumption.config, str(self.resumption.checkpoint)
            return {"config": [below, self.config], "ckpt_path": checkpoint}, self.resumption.lines
        if command == "fit":
            return self.config, ()
        checkpoint = self.config.get("ckpt_path") or ""
        if not checkpoint:
            example = f"recsys-topk {command} --ckpt_path runs/NAME/checkpoints/best.ckpt"
            raise ValueError(f"{command} needs a trained model: {example}")
        content = read_checkpoint(checkpoint)
        return {"config": [config_from_checkpoint(content), self.config]}, describe_checkpoint(checkpoint, content)


@contextmanager
def _weights_fit() -> Iterator[None]:
    """Make the error of weights that do not fit the model one line."""
    try:
        yield
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        first = " ".join(str(error).split("\n\t")[1:2])
        raise ValueError(
            f"the checkpoint's weights do not fit this model; give the options it was trained with. {first}"
        ) from error
