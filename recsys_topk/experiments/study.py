"""The trials of one competitor as an Optuna study.

Trials are proposed in rounds of `ROUND`. A proposal depends on the seed and on the trials of earlier rounds only, and a
trial that was killed runs again with the same options. The trials therefore depend neither on the number of parallel
jobs nor on interruptions.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from recsys_topk.experiments.search_space import Space, as_text, draw
from recsys_topk.experiments.tuning_trial import TuningTrial
from recsys_topk.runs.config import flatten_config, set_option
from recsys_topk.runs.run import TrainingRun
from recsys_topk.runs.trials import Competition, file_name

ROUND = 4
# Pruning compares a trial with the median of at least so many finished trials.
ENOUGH = 3


@dataclass(frozen=True)
class Tuning:
    """How to tune."""

    spaces: Mapping[str, Space]  # the search space of each competitor
    trials: int = 8  # number of trials per competitor
    # None = the best monitored validation metric (`model.monitor`). A metric over the whole catalogue, e.g.
    # "recall@20/corpus", is measured on the validation days with the best checkpoint.
    metric: str | None = None
    seed: int = 0  # seed of the proposals, and of the weights and batches of every trial
    # URL of the database of Optuna; None = an SQLite file in the folder of the results. Several machines may share a
    # database, if the folder of the results has the same name on all of them.
    storage: str | None = None
    prune: bool = True  # stop trials that are below the median of earlier trials after the same number of validations

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"the number of trials must be at least 1, got {self.trials}")
        if self.metric is not None and not self.metric.endswith("/corpus"):
            raise ValueError(
                f"--metric must be a metric over the whole catalogue, e.g. recall@20/corpus, got {self.metric!r}; "
                f"--model.monitor selects the validation metric that is used without it"
            )


class Study:
    """The Optuna study of one competitor."""

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
        """Propose the trials of the round that starts at `begin`; return those that this machine has to run."""
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


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError("tuning needs Optuna: pip install 'recsys-topk[tune]'", name="optuna") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
