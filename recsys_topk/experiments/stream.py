"""Streams: for several variants, test on each day and then train on it, day by day."""

from __future__ import annotations

import json
import os
import statistics
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recsys_topk.experiments.compare import write_results
from recsys_topk.files import write_whole
from recsys_topk.reports.sections import stream_figures
from recsys_topk.runs.run import LogLine, TrainingRun
from recsys_topk.runs.statistics import Runs, curves, means
from recsys_topk.runs.trials import Competition, Send, Trial, by_label, measure_seconds, run_all
from recsys_topk.runs.wandb.environment import offline_wandb
from recsys_topk.runs.wandb.lineage import use_data
from recsys_topk.runs.wandb.logger import wandb_loggers
from recsys_topk.text import table

# A stream has no validation day, and `stream_days` writes its own checkpoints.
PROTOCOL: dict[str, Any] = {"limit_val_batches": 0, "enable_checkpointing": False, "num_sanity_val_steps": 0}
SEED_STEP = 1_000_003


def stream(competition: Competition, facts: Mapping[str, Any], log_line: LogLine) -> None:
    """Run the days that have no result yet, print one line per day, then print and write the curves."""
    trials = competition.trials("days", job="stream")
    collect(trials)  # raises before the first run if a file was made with other options

    def report_day(trial: Trial, entry: Mapping[str, Any]) -> None:
        measured = [f"{name} {value:.4f}" for name, value in entry.get("metrics", {}).items()]
        head = f"{trial.label}, seed {trial.seed}, {entry['day']}"
        log_line(f"{head}: {', '.join(measured) or 'trained, not tested'} ({entry['seconds']:.0f} s)")

    def report_trial(trial: Trial) -> str:
        write(competition.out, {**facts, "runs": collect(trials)}, log_line)
        joint = [next(iter(entry["metrics"].values())) for entry in trial.read()["days"]]
        return f"{len(joint)} days tested, mean {statistics.fmean(joint) if joint else float('nan'):.4f}"

    run_all(stream_days, trials, len(trials), competition, report_trial, log_line, report_day)
    runs = collect(trials)
    log_line(table(curve_table(runs)))
    log_line(write(competition.out, {**facts, "runs": runs}, log_line))


def stream_days(trial: Trial, send: Send) -> None:
    """Resume a stream and run it to the last day of the data. Save a checkpoint and report the result after each day.

    Every day starts by loading the checkpoint of the previous day (weights, optimizer, schedule) and by setting the
    random seed of the day. The result therefore does not depend on whether the stream was interrupted.

    The file of the trial names the checkpoint that belongs to its numbers. It is replaced after the new checkpoint is
    written, and the old checkpoint is deleted after that. File and checkpoint are consistent whenever the process is
    killed.
    """
    from lightning.pytorch import seed_everything

    from recsys_topk.datamodules import DayStream

    new = {**trial.identity(), "wandb_id": uuid.uuid4().hex[:8], "checkpoint": None, "first": None, "days": []}
    record = trial.read() or new
    os.environ["WANDB_RUN_ID"] = record["wandb_id"]
    run = trial.run(**PROTOCOL)
    begin = _next_day(DayStream(run.data).days, record, trial.target)
    if begin is None:
        run.directory.path.rmdir()  # there is nothing left to train
        return
    epochs = run.trainer.max_epochs
    if epochs is None or epochs < 1:
        raise ValueError(f"--trainer.max_epochs, the number of passes over each day, must be at least 1, got {epochs}")
    stream = DayStream(run.data, begin=begin)
    _tell_wandb(run, record, stream.days)
    for step in stream:
        number = stream.days.index(step.day)
        before = None if record["checkpoint"] is None else str((trial.target.parent / record["checkpoint"]).resolve())
        seed_everything((trial.seed + number * SEED_STEP) % 2**32, verbose=False)
        entry: dict[str, Any] = {"day": step.day, "requests": step.train.requests}
        if step.test is not None:
            (measured,) = run.trainer.test(run.model, datamodule=step.data, ckpt_path=before, verbose=False)
            entry |= short_metrics(measured)
        run.trainer.fit_loop.max_epochs = epochs * (number + 1)
        entry["seconds"] = measure_seconds(_fit, run, step.data, before)
        _save(run, trial.target, record, entry)
        _log_day(run, entry, number + 1)
        send(entry)
    for logger in wandb_loggers(run.trainer.loggers):
        use_data(logger.experiment, run.data)


def _fit(run: TrainingRun, data: Any, checkpoint: str | None) -> None:
    run.trainer.fit(run.model, datamodule=data, ckpt_path=checkpoint)
    if run.trainer.interrupted:
        raise KeyboardInterrupt


def _next_day(days: tuple[str, ...], record: Mapping[str, Any], target: Path) -> str | None:
    done = [entry["day"] for entry in (record["first"], *record["days"]) if entry is not None]
    if tuple(done) != days[: len(done)]:
        raise ValueError(
            f"{target} was trained on {', '.join(done)}, but the data now has {', '.join(days)}; use another --out, or "
            f"delete that file to start again"
        )
    return None if len(done) == len(days) else days[len(done)]


def short_metrics(measured: Mapping[str, float]) -> dict[str, Any]:
    """Return the metrics of a test by short name, and the length of the lists, which is part of the long names."""
    names = {name: name.removeprefix("test/").rpartition("/") for name in measured}
    metrics = {names[name][0]: float(value) for name, value in measured.items()}
    items = next(iter(names.values()))[2]
    return {"metrics": metrics, "candidates": int(items) if items.isdigit() else items}


def _save(run: TrainingRun, target: Path, record: dict[str, Any], entry: dict[str, Any]) -> None:
    old, new = record["checkpoint"], f"{target.stem}-{entry['day']}.ckpt"
    run.trainer.save_checkpoint(target.parent / new)
    if "metrics" in entry:
        record["days"].append(entry)
    else:
        record["first"] = entry
    record["checkpoint"] = new
    write_whole(target, json.dumps(record, indent=1))
    if old is not None:
        run.trainer.strategy.remove_checkpoint(target.parent / old)


def _tell_wandb(run: TrainingRun, record: Mapping[str, Any], days: tuple[str, ...]) -> None:
    """Define the W&B axis. Offline, log the earlier days again, because a resumed run is a separate offline run."""
    for logger in wandb_loggers(run.trainer.loggers):
        logger.experiment.define_metric("stream/day")
        for name in ("*", *run.model.metrics["test"]):  # also by name, because Lightning already defines `*`
            logger.experiment.define_metric(f"stream/{name}", step_metric="stream/day")
        for entry in record["days"] if offline_wandb() else ():
            _log_day(run, entry, days.index(entry["day"]) + 1)


def _log_day(run: TrainingRun, entry: Mapping[str, Any], number: int) -> None:
    for logger in wandb_loggers(run.trainer.loggers) if "metrics" in entry else ():
        metrics = {f"stream/{name}": value for name, value in entry["metrics"].items()}
        logger.experiment.log({"stream/day": number, "stream/date": entry["day"], **metrics})


def collect(trials: Sequence[Trial]) -> dict[str, list[dict[str, Any]]]:
    """Return the results so far, by label: seed, config, the first day, and the tested days."""
    kept = ("seed", "given", "first", "days")
    return {
        label: [{name: record[name] for name in kept} for record in (trial.read() for trial in runs) if record]
        for label, runs in by_label(trials).items()
    }


def curve_table(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per day with the joint recall of each variant, averaged over seeds; the last row is the mean."""
    lines = means(curves(runs))
    days = sorted({day for line in lines.values() for day in line})
    rows: list[dict[str, Any]] = [
        {"day": day, **{label: line[day] for label, line in lines.items() if day in line}} for day in days
    ]
    mean = {label: statistics.fmean(line.values()) for label, line in lines.items()}
    return [*rows, {"day": "mean", **mean}] if rows else []


def write(folder: Path, content: Mapping[str, Any], log_line: LogLine) -> str:
    """Write stream.json, stream.csv (one line per run and day) and stream.svg. Return a line that names the files."""
    runs: Runs = content["runs"]
    lines = [
        {"run": label, "seed": record["seed"], "day": entry["day"], "requests": entry["requests"],
         "seconds": entry["seconds"], **entry["metrics"]}
        for label, records in runs.items() for record in records for entry in record["days"]
    ]  # fmt: skip
    return write_results(folder, "stream", content, lines, lambda: stream_figures(runs), log_line)[0]
