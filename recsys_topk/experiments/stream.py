"""One run through the days: test on a day, train on it, save; `recsys_topk.runs.trials` gives it a process."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.runs.files import write_whole
from recsys_topk.runs.trials import Trial, build, train

if TYPE_CHECKING:
    from recsys_topk.runs.lightning_cli import CascadeCLI

# There is no validation day in a stream, and `stream_days` keeps checkpoints of its own.
PROTOCOL = ("--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false", "--trainer.num_sanity_val_steps=0")
_SEED_STEP = 1_000_003


def stream_days(trial: Trial, say: Callable[[Any], None]) -> None:
    """Go on with a stream where it was, to the last day of the data; after each day save everything and tell it.

    Every day begins by loading the checkpoint of the day before (weights, optimizer, schedule) and by seeding the
    random generators with the day's own seed. Thus it makes no difference whether the process is the same.

    The file of the trial is replaced last: it names the checkpoint that belongs to its numbers, and the one before is
    deleted only then. Whenever the process is killed, the two fit together.
    """
    from lightning.pytorch import seed_everything

    from recsys_topk.datamodules import DayStream

    new = {**trial.identity(), "wandb_id": uuid.uuid4().hex[:8], "checkpoint": None, "first": None, "days": []}
    record = trial.read() or new
    os.environ["WANDB_RUN_ID"] = record["wandb_id"]
    cli = build(trial, *PROTOCOL)
    begin = _next_day(DayStream(cli.datamodule).days, record, trial.target)
    if begin is None:
        cli.run.path.rmdir()  # made for a training that is not needed
        return
    epochs = cli.trainer.max_epochs
    if epochs is None or epochs < 1:
        raise ValueError(f"--trainer.max_epochs is the number of passes over each day, at least 1; got {epochs}")
    stream = DayStream(cli.datamodule, begin=begin)
    _tell_wandb(cli, record, stream.days)
    for step in stream:
        number = stream.days.index(step.day)
        before = None if record["checkpoint"] is None else str(trial.target.parent / record["checkpoint"])
        seed_everything((trial.seed + number * _SEED_STEP) % 2**32, verbose=False)
        entry: dict[str, Any] = {"day": step.day, "requests": step.train.requests}
        if step.test is not None:
            (measured,) = cli.trainer.test(cli.model, datamodule=step.data, ckpt_path=before, verbose=False)
            entry |= _metrics(measured)
        cli.trainer.fit_loop.max_epochs = epochs * (number + 1)
        entry["seconds"] = train(cli, partial(cli.trainer.fit, cli.model, datamodule=step.data, ckpt_path=before))
        _save(cli, trial.target, record, entry)
        _log_day(cli, entry, number + 1)
        say({"names": list(cli.model.metrics["test"]), **entry})


def _next_day(days: tuple[str, ...], record: Mapping[str, Any], target: Path) -> str | None:
    done = [entry["day"] for entry in (record["first"], *record["days"]) if entry is not None]
    if tuple(done) != days[: len(done)]:
        raise ValueError(
            f"{target} has learned {', '.join(done)}, and the data now hold {', '.join(days)}; give another --out, or "
            f"delete that file to begin anew"
        )
    return None if len(done) == len(days) else days[len(done)]


def _metrics(measured: Mapping[str, float]) -> dict[str, Any]:
    """Return the metrics of a test by their short names, and the length of the lists, which their long names carry."""
    names = {name: name.removeprefix("test/").rpartition("/") for name in measured}
    metrics = {names[name][0]: float(value) for name, value in measured.items()}
    return {"metrics": metrics, "candidates": int(next(iter(names.values()))[2])}


def _save(cli: CascadeCLI, target: Path, record: dict[str, Any], entry: dict[str, Any]) -> None:
    old, new = record["checkpoint"], f"{target.stem}-{entry['day']}.ckpt"
    cli.trainer.save_checkpoint(target.parent / new)
    if "metrics" in entry:
        record["days"].append(entry)
    else:
        record["first"] = entry
    record["checkpoint"] = new
    write_whole(target, json.dumps(record, indent=1))
    if old is not None:
        (target.parent / old).unlink(missing_ok=True)


def _tell_wandb(cli: CascadeCLI, record: Mapping[str, Any], days: tuple[str, ...]) -> None:
    """Define the axis; offline, where the part of an interrupted run is a run of its own, give it the days before."""
    from recsys_topk.runs.directory import offline_wandb
    from recsys_topk.runs.wandb_logging import wandb_loggers

    for logger in wandb_loggers(cli.trainer.loggers):
        logger.experiment.define_metric("stream/day")
        for name in ("*", *cli.model.metrics["test"]):  # by name too: Lightning has defined `*`, W&B takes either glob
            logger.experiment.define_metric(f"stream/{name}", step_metric="stream/day")
        for entry in record["days"] if offline_wandb() else ():
            _log_day(cli, entry, days.index(entry["day"]) + 1)


def _log_day(cli: CascadeCLI, entry: Mapping[str, Any], number: int) -> None:
    from recsys_topk.runs.wandb_logging import wandb_loggers

    for logger in wandb_loggers(cli.trainer.loggers) if "metrics" in entry else ():
        metrics = {f"stream/{name}": value for name, value in entry["metrics"].items()}
        logger.experiment.log({"stream/day": number, "stream/date": entry["day"], **metrics})
