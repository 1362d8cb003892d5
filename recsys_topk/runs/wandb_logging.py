"""W&B: a logger that never prompts, axes and summaries that mean something, tables and weights."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, WandbLogger

from recsys_topk.runs.directory import RunDirectory, offline_wandb

STEP = "trainer/global_step"
# What `recsys-topk test` needs of a checkpoint: weights and plain descriptions, no optimizer state.
KEPT = ("state_dict", "hyper_parameters", "datamodule_hyper_parameters", "epoch", "global_step")
LIGHTNING = "pytorch-lightning_version"


PROJECT = "recsys-topk"


def make_wandb(run: RunDirectory, options: Mapping[str, Any] | None = None) -> WandbLogger:
    """Return the logger of a run; a resumed run keeps the id that `run.json` or the environment holds.

    Args:
        run: Where it writes.
        options: Arguments of `wandb.init` by name (`WANDB_OPTIONS`); None = its default.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if isinstance(given.get("tags"), str):
        given["tags"] = [tag.strip() for tag in given["tags"].split(",")]
    known = run.facts.get("wandb_id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    offline = offline_wandb(given.pop("mode", None))
    # W&B reads its environment once in a process, so the mode is given too.
    mode = {"mode": "offline" if offline else "online"}
    logger = WandbLogger(
        **{"name": run.path.name, "project": PROJECT, **given},
        id=known,
        save_dir=str(run.path),
        offline=offline,
        **mode,
    )
    logger._wandb_init.pop("anonymous", None)  # Lightning passes it on, and W&B warns that it has no effect
    return logger


def wandb_loggers(loggers: Sequence[Logger]) -> list[WandbLogger]:
    """Return those of some loggers that log to W&B."""
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]


def describe_run(logger: WandbLogger, config: Mapping[str, Any], recalls: Sequence[str]) -> None:
    """Log the whole configuration, and say what the metrics are drawn against and how they are summed up.

    Everything is drawn over the optimizer steps. A recall's summary holds the largest value (`max`, the one to compare
    runs by) and the final one (`last`). The recalls are named one by one too: Lightning defines `*`, and of two globs
    that fit a name W&B takes either, not always the same.

    Args:
        logger: Logs to W&B.
        config: The configuration.
        recalls: Names of the validation metrics.
    """
    logger.log_hyperparams(dict(config))
    experiment = logger.experiment
    experiment.define_metric(STEP)
    experiment.define_metric("train/*", step_metric=STEP)
    for name in ("val/*", *recalls):
        experiment.define_metric(name, step_metric=STEP, summary="max,last")
    experiment.define_metric("test/*", step_metric=STEP)


def log_summary(logger: WandbLogger, rows: Sequence[Mapping[str, str]]) -> None:
    """Sum the validation metrics up over the whole run: W&B itself sees only what came after a resumption.

    Args:
        logger: Logs to W&B.
        rows: The rows of metrics.csv.
    """
    for name in sorted({name for row in rows for name in row if name.startswith("val/")}):
        values = [float(row[name]) for row in rows if row[name]]
        if values:
            logger.experiment.summary[name] = {"max": max(values), "last": values[-1]}


def log_weights(logger: WandbLogger, name: str, checkpoints: Mapping[str, Path], metadata: Mapping[str, Any]) -> None:
    """Upload checkpoints as one artifact: weights and plain descriptions, neither code nor optimizer state.

    `recsys-topk test --ckpt_path` takes such a file. Offline it is kept and goes up with `wandb sync`.

    Args:
        logger: Logs to W&B.
        name: The artifact's name.
        checkpoints: Files by what they are called in the artifact, e.g. ``best``.
        metadata: What stands beside it.
    """
    import wandb

    artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
    with tempfile.TemporaryDirectory() as folder:
        for label, path in checkpoints.items():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            bare = Path(folder) / f"{label}.ckpt"
            torch.save({key: content[key] for key in (*KEPT, LIGHTNING) if key in content}, bare)
            artifact.add_file(str(bare), name=bare.name)
        logger.experiment.log_artifact(artifact, aliases=["latest", *checkpoints])


def log_once(
    folder: Path,
    job: str,
    name: str,
    config: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    pictures: Mapping[str, bytes],
    pages: Mapping[str, Path] | None = None,
) -> None:
    """Log tables, pictures and pages as one W&B run of its own, offline without a key.

    Args:
        folder: Where W&B writes.
        job: Type of the run.
        name: Name of the run and of its group.
        config: Its config.
        tables: Rows by key.
        pictures: PNG images by key.
        pages: HTML files by key.
    """
    if os.environ.get("WANDB_MODE") == "disabled":
        return

    import wandb

    with (
        tempfile.TemporaryDirectory() as scratch,
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=name, group=name, job_type=job,
            config=dict(config), dir=str(folder.resolve()),
            mode="offline" if offline_wandb() else "online", settings=wandb.Settings(silent=True),
        ) as run,
    ):  # fmt: skip
        logged: dict[str, Any] = {key: wandb.Html(str(path)) for key, path in (pages or {}).items()}
        for key, rows in tables.items():
            columns = list(rows[0])
            logged[key] = wandb.Table(columns, [[row[column] for column in columns] for row in rows])
        for number, (key, content) in enumerate(pictures.items()):
            picture = Path(scratch) / f"{number}.png"
            picture.write_bytes(content)
            logged[key] = wandb.Image(str(picture))
        run.log(logged)
