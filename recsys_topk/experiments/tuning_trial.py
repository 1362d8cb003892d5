"""One trial of a tuning: a training run that is judged on the validation days, and may be stopped early."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from recsys_topk.evaluation.corpus_metrics import corpus_options
from recsys_topk.files import write_whole
from recsys_topk.runs.run import TrainingRun
from recsys_topk.runs.trials import Send, Trial, measure_seconds


@dataclass(frozen=True)
class TuningTrial(Trial):
    """One trial of a tuning."""

    number: int = 0  # number of the trial in its study
    metric: str | None = None  # as that of `Tuning`
    # The value that a trial must reach after each validation, by the number of validations.
    thresholds: Mapping[int, float] = field(default_factory=dict)


class Judge(Callback):  # type: ignore[misc]  # lightning is untyped here
    """Records the monitored metric after each validation, and stops a run that is below a threshold (`TuningTrial`)."""

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
        run.trainer.strategy.remove_checkpoint(file)  # a trial is never resumed, and the best options are trained again
    result = {"number": trial.number, "value": value, "values": judge.values, "pruned": judge.pruned}
    write_whole(trial.target, json.dumps({**trial.identity(), **result, "seconds": seconds}, indent=1))


def load_best(run: TrainingRun) -> None:
    """Load the weights of `best.ckpt`, which the monitored validation metric selects, if there is one."""
    from recsys_topk.cascades.shards import load_into, load_stored

    file = run.directory.path / "checkpoints" / "best.ckpt"
    if file.is_file():
        load_into(run.model, load_stored(file)["state_dict"])
