"""Tuning: the same number of trials per competitor, judged on the validation days, with Optuna.

Trials are proposed in rounds of `ROUND`. A proposal depends on the seed and on the trials of earlier rounds only, and a
trial that was killed runs again with the same options. The trials therefore depend neither on the number of parallel
jobs nor on interruptions.
"""

from __future__ import annotations

import json
import math
import shlex
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from recsys_topk.experiments.search_space import Space, as_text, draw
from recsys_topk.files import csv_text, write_whole
from recsys_topk.runs.config import as_options, flatten_config, merge, set_option
from recsys_topk.runs.run import LogLine, TrainingRun
from recsys_topk.runs.trials import (
    Competition,
    Countdown,
    Send,
    Trial,
    TrialsFailedError,
    file_name,
    in_processes,
    measure_seconds,
)
from recsys_topk.text import table

ROUND = 4
# Pruning compares a trial with the median of at least so many finished trials.
ENOUGH = 3


@dataclass(frozen=True)
class Tuning:
    """How to tune.

    Attributes:
        spaces: The search space of each competitor.
        trials: Number of trials per competitor.
        metric: None = the best monitored validation metric (`model.monitor`). A metric over the whole catalogue, e.g.
            ``"recall@20/corpus"``, is measured on the validation days with the best checkpoint.
        seed: Seed of the proposals, and of the weights and batches of every trial.
        storage: URL of the database of Optuna; None = an SQLite file in the folder of the results. Several machines
            may share a database, if the folder of the results has the same name on all of them.
        prune: Stop trials that are below the median of earlier trials after the same number of validations.
    """

    spaces: Mapping[str, Space]
    trials: int = 8
    metric: str | None = None
    seed: int = 0
    storage: str | None = None
    prune: bool = True

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"the number of trials must be at least 1, got {self.trials}")
        if self.metric is not None and not self.metric.endswith("/corpus"):
            raise ValueError(
                f"--metric must be a metric over the whole catalogue, e.g. recall@20/corpus, got {self.metric!r}; "
                f"--model.monitor selects the validation metric that is used without it"
            )


@dataclass(frozen=True)
class TuningTrial(Trial):
    """One trial of a tuning.

    Attributes:
        number: Number of the trial in its study.
        metric: As that of `Tuning`.
        thresholds: The value that a trial must reach after each validation, by the number of validations.
    """

    number: int = 0
    metric: str | None = None
    thresholds: Mapping[int, float] = field(default_factory=dict)


class Judge(Callback):  # type: ignore[misc]  # lightning is untyped here
    """Records the monitored metric after each validation, and stops a run that is below a threshold.

    Args:
        thresholds: See `TuningTrial`.

    Attributes:
        values: The metric after each validation.
        pruned: Whether the run was stopped.
    """

    def __init__(self, thresholds: Mapping[int, float]) -> None:
        self.thresholds = thresholds
        self.values: list[float] = []
        self.pruned = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the metric; stop the run if its best value is below the threshold."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.values.append(float(trainer.callback_metrics[f"val/{pl_module.monitor}"]))
        threshold = self.thresholds.get(len(self.values))
        if threshold is not None and not max(self.values) >= threshold:
            self.pruned = trainer.should_stop = True


def run_trial(trial: TuningTrial, send: Send) -> None:
    """Train one trial, measure it on the validation days, and write its result."""
    over_catalogue = trial.metric is not None
    run = trial.run(enable_checkpointing=over_catalogue)
    if not run.data.splits["val"]:
        raise ValueError("tuning needs validation data; give --data.val_days, or another --data.split")
    run.data.prepare_data()
    judge = Judge(trial.thresholds)
    run.trainer.callbacks.append(judge)
    seconds = measure_seconds(run.fit)
    value = max((value for value in judge.values if not math.isnan(value)), default=math.nan)
    if trial.metric is not None and not judge.pruned:
        load_best(run)
        value = run.validate(corpus=corpus_options(trial.metric))[f"val/{trial.metric}"]
    for file in run.directory.path.glob("checkpoints/*.ckpt"):
        file.unlink()  # a trial is never resumed, and the best options are trained again
    result = {"number": trial.number, "value": value, "values": judge.values, "pruned": judge.pruned}
    write_whole(trial.target, json.dumps({**trial.identity(), **result, "seconds": seconds}, indent=1))


def load_best(run: TrainingRun) -> None:
    """Load the weights of `best.ckpt`, which the monitored validation metric selects, if there is one."""
    import torch

    file = run.directory.path / "checkpoints" / "best.ckpt"
    if file.is_file():
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        run.model.load_state_dict(content["state_dict"])


def corpus_options(metric: str) -> dict[str, Any]:
    """Return the options of an evaluation over the catalogue that measures a metric, e.g. ``recall@20/corpus``."""
    cut = metric.partition("/")[0].partition("@")[2]
    return {"baselines": False, **({"cuts": [int(cut)]} if cut.isdigit() else {})}


def tune(
    competition: Competition, tuning: Tuning, facts: Mapping[str, Any], log_line: LogLine
) -> dict[str, dict[str, Any]]:
    """Run the trials that have no result yet, then print and write all trials. Return the best config by competitor.

    Args:
        competition: The competitors; its `seeds` is not used.
        tuning: How to tune.
        facts: Provenance of the numbers (`recsys_topk.runs.provenance`).
        log_line: Called with each line of progress and with the table.
    """
    competition.check()
    folder = competition.out
    with _locked(folder):
        studies = {label: Study(competition, tuning, label) for label in competition.variants}
        total, failures = tuning.trials * len(studies), list[str]()
        countdown = Countdown(total, sum(study.finished for study in studies.values()), log_line)
        for begin in range(0, tuning.trials, ROUND):
            todo = [trial for study in studies.values() for trial in study.round(begin)]
            countdown.number = sum(study.finished for study in studies.values())
            for trial, failure in in_processes(run_trial, todo, competition.jobs, lambda *_: None):  # type: ignore[arg-type]
                assert isinstance(trial, TuningTrial)
                name = f"{trial.label}, trial {trial.number}"
                if failure is None:
                    countdown.line(f"{name}: {studies[trial.label].tell(trial)}")
                else:
                    failures.append(f"{name}: {failure}")
                    log_line(f"{name}: {failure} (more in {trial.log})")
            if failures:
                raise TrialsFailedError(
                    f"{len(failures)} trials failed; the first: {failures[0]}. Correct it and run the command again"
                )
    records = {label: study.records() for label, study in studies.items()}
    running = sum(record["state"] == "RUNNING" for trials in records.values() for record in trials)
    if running:
        log_line(f"{running} trials are not finished on other machines; run the command again when they are")
    best = {label: _best(label, trials) for label, trials in records.items()}
    rows = [
        {"run": label, "metric": best[label]["value"], "trial": best[label]["number"], **best[label]["options"]}
        for label in best
    ]
    log_line(table(rows))
    spaces = {label: as_text(space) for label, space in tuning.spaces.items()}
    content = {"trials": records, "best": best, "metric": tuning.metric, "seed": tuning.seed, "spaces": spaces, **facts}
    every = [{"run": label, **_flat(record)} for label, trials in records.items() for record in trials]
    write_whole(folder / "tuning.json", json.dumps(content, indent=1))
    write_whole(folder / "tuning.csv", csv_text(every))
    configs = {label: with_options(competition.variants[label], record["options"]) for label, record in best.items()}
    for label, config in configs.items():
        options = as_options(merge(competition.common, config))
        log_line(f"{label}: recsys-topk fit {shlex.join(options)}")
    log_line(f"written: {folder / 'tuning.json'}, {folder / 'tuning.csv'}")
    return configs


class Study:
    """The Optuna study of one competitor.

    Args:
        competition: The competition.
        tuning: How to tune.
        label: The competitor.
    """

    def __init__(self, competition: Competition, tuning: Tuning, label: str) -> None:
        optuna = _optuna()
        self.competition, self.tuning, self.label = competition, tuning, label
        self.space = tuning.spaces[label]
        folder = competition.out.resolve()
        self.worker = f"{socket.gethostname()}:{folder}"
        folder.mkdir(parents=True, exist_ok=True)
        self.study = optuna.create_study(
            storage=tuning.storage or f"sqlite:///{folder / 'optuna.db'}", study_name=f"{folder.name}/{label}",
            direction="maximize", load_if_exists=True,
        )  # fmt: skip
        self._check_identity()

    def _check_identity(self) -> None:
        """Raise if the study was created with other options; check one trial's options before the first run."""
        lowest = {option: one.values[0] for option, one in self.space.items()}
        checked = with_options(self.competition.variants[self.label], lowest)
        TrainingRun({"config": [self.competition.common, checked]}).options()
        plain = self.competition.trial(self.label, self.competition.variants[self.label], 0, "x", "x", "tune")
        identity = {"metric": self.tuning.metric, "seed": self.tuning.seed, "prune": self.tuning.prune}
        identity |= {f"--{key}": str(value) for key, value in flatten_config(plain.config).items()}
        identity |= {f"--space {key}": text for key, text in as_text(self.space).items()}
        before = self.study.user_attrs.setdefault("identity", identity)
        changed = [key for key in {**before, **identity} if before.get(key) != identity.get(key)]
        if changed:
            key = changed[0]
            raise ValueError(
                f"the study {self.study.study_name!r} was tuned with other options: {key} was {before.get(key)!r} and "
                f"is {identity.get(key)!r} now; give another --out"
            )
        self.study.set_user_attr("identity", identity)

    @property
    def finished(self) -> int:
        """The number of finished trials."""
        return sum(trial.state.is_finished() for trial in self.study.trials)

    def round(self, begin: int) -> list[TuningTrial]:
        """Propose the trials of a round that do not exist; return those that this machine has to run.

        Args:
            begin: Number of the first trial of the round.
        """
        from optuna.trial import Trial as OptunaTrial

        end = min(begin + ROUND, self.tuning.trials)
        while len(self.study.trials) < end:
            self.study.ask().set_user_attr("worker", self.worker)
        thresholds = self._thresholds(begin) if self.tuning.prune else {}
        trials = []
        for frozen in self.study.trials[begin:end]:
            if frozen.state.is_finished() or frozen.user_attrs.get("worker", self.worker) != self.worker:
                continue
            stored = OptunaTrial(self.study, frozen._trial_id)
            options = draw(self.study, stored, self.space, self.tuning.seed)
            stored.set_user_attr("options", options)
            trials.append(self._trial(frozen.number, options, thresholds))
        for trial in trials:
            if trial.read():  # killed after the run and before its result was stored
                self.tell(trial)
        return [trial for trial in trials if not trial.read()]

    def tell(self, trial: TuningTrial) -> str:
        """Store the result of a trial; return its summary."""
        from optuna.trial import Trial as OptunaTrial
        from optuna.trial import TrialState

        result = trial.read()
        frozen = next(one for one in self.study.trials if one.number == trial.number)
        stored = OptunaTrial(self.study, frozen._trial_id)
        for step, value in enumerate(result["values"], start=1):
            stored.report(value, step)
        stored.set_user_attr("seconds", result["seconds"])
        if result["pruned"] or math.isnan(result["value"]):
            self.study.tell(trial.number, state=TrialState.PRUNED)
        else:
            self.study.tell(trial.number, result["value"])
        return f"{result['value']:.4f}{' (pruned)' if result['pruned'] else ''} ({result['seconds']:.0f} s)"

    def records(self) -> list[dict[str, Any]]:
        """Return all trials as plain values."""
        return [
            {
                "number": trial.number,
                "state": trial.state.name,
                "value": trial.value if trial.state.name == "COMPLETE" else None,
                "options": trial.user_attrs.get("options", {}),
                "values": list(trial.intermediate_values.values()),
                "seconds": trial.user_attrs.get("seconds"),
            }
            for trial in self.study.trials[: self.tuning.trials]
        ]

    def _thresholds(self, begin: int) -> dict[int, float]:
        """Return the median after each validation of the complete trials of earlier rounds."""
        values: dict[int, list[float]] = {}
        for trial in self.study.trials[:begin]:
            for step, value in trial.intermediate_values.items() if trial.state.name == "COMPLETE" else ():
                values.setdefault(step, []).append(value)
        return {step: statistics.median(reached) for step, reached in values.items() if len(reached) >= ENOUGH}

    def _trial(self, number: int, options: Mapping[str, Any], thresholds: Mapping[int, float]) -> TuningTrial:
        variant = with_options(self.competition.variants[self.label], options)
        name = f"{file_name(self.label)}-t{number}"
        trial = self.competition.trial(self.label, variant, self.tuning.seed, name, "tuning", "tune")
        return TuningTrial(**vars(trial), number=number, metric=self.tuning.metric, thresholds=thresholds)


def with_options(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with further options by dotted key.

    Example:
        >>> with_options({"loss": "dftopk"}, {"loss.tau": 2.0, "model.lr": 0.1})
        {'loss': {'class_path': 'dftopk', 'init_args': {'tau': 2.0}}, 'model': {'lr': 0.1}}
    """
    changed = deepcopy(dict(config))
    for option, value in options.items():
        set_option(changed, option, value)
    return changed


def _best(label: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    complete = [record for record in records if record["value"] is not None]
    if not complete:
        raise ValueError(f"no trial of {label!r} has a result; every one diverged or is running elsewhere")
    return dict(max(complete, key=lambda record: record["value"]))


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: record[key] for key in ("number", "state", "value", "seconds")}
    return {**shown, **{key: json.dumps(value) for key, value in record["options"].items()}}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of results, so that no second process runs its trials."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder} is being tuned by another process; wait for it, or give another --out") from None
    try:
        yield
    finally:
        lock.release()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError("tuning needs Optuna: pip install 'recsys-topk[tune]'", name="optuna") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
