"""The W&B logger of a run, and W&B runs of tables and figures."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from recsys_topk.runs.directory import RunDirectory
from recsys_topk.runs.metrics_file import read_rows
from recsys_topk.runs.wandb.environment import offline_wandb
from recsys_topk.runs.wandb.lineage import linked_run, log_weights, run_facts, use_data, use_weights

if TYPE_CHECKING:
    from recsys_topk.runs.run import Command, TrainingRun

STEP = "trainer/global_step"
PROJECT = "recsys-topk"


class RunLogger(WandbLogger):  # type: ignore[misc]  # lightning is untyped here
    """Lightning's logger, with the best value of each validation metric as a plain number in the summary.

    W&B's ``define_metric(summary="max")`` writes ``{"max": value}``, which sweeps and tables do not read as a number.
    `linked` is the training run of the measured checkpoint (`linked_run`).
    """

    def __init__(self, linked: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.linked = dict(linked or {})
        self._wandb_init.pop("anonymous", None)  # an option of Lightning about which W&B warns
        self.best: dict[str, float] = {}

    @rank_zero_only  # type: ignore[untyped-decorator]  # lightning is untyped here
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics. In the summary, replace the newest value of the metrics in `best` by the largest."""
        super().log_metrics(metrics, step)
        self.keep_best({name: float(value) for name, value in metrics.items() if name in self.best})

    def keep_best(self, values: Mapping[str, float]) -> None:
        """Write the largest value so far of each metric to the summary."""
        for name, value in values.items():
            self.best[name] = max(value, self.best[name])
            self.experiment.summary[name] = self.best[name]


def make_wandb(
    run: RunDirectory,
    options: Mapping[str, Any] | None = None,
    command: str = "fit",
    checkpoint: str | Path | None = None,
) -> RunLogger:
    """Return the logger of a run; a resumed run keeps the id in `run.json` or in the environment.

    `options` are arguments of `wandb.init` by name (`WANDB_OPTIONS`). The training run of a measured checkpoint is the
    default for project, entity and group. The job type is ``"train"`` for ``fit``, otherwise the command.
    """
    given = _given(options)
    known = run.facts.get("wandb_id") or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    offline = offline_wandb(given.pop("mode", None))
    linked = linked_run(checkpoint)
    defaults = {"name": run.path.name, "project": PROJECT, "job_type": "train" if command == "fit" else command}
    defaults |= {name: linked[name] for name in ("project", "entity", "group") if name in linked}
    # W&B reads its environment once per process, so the mode is passed as well.
    mode = {"mode": "offline" if offline else "online"}
    return RunLogger(linked, **{**defaults, **given}, id=known, save_dir=str(run.path), offline=offline, **mode)


def _given(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that are set, with tags as a list."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if isinstance(given.get("tags"), str):
        given["tags"] = [tag.strip() for tag in given["tags"].split(",")]
    return given


def wandb_loggers(loggers: Sequence[Logger]) -> list[WandbLogger]:
    """Return the W&B loggers."""
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]


def describe_run(logger: WandbLogger, config: Mapping[str, Any], recalls: Sequence[str]) -> None:
    """Log the config, and define the axis and the summary of the metrics.

    The axis is the optimizer step. The summary of a recall is its largest value, also over the time before a
    resumption. The recalls are named one by one: Lightning defines `*`, and if two patterns match a name, W&B uses
    either. The config of a run that measures a checkpoint contains ``training_run``.
    """
    linked = logger.linked if isinstance(logger, RunLogger) else {}
    logger.log_hyperparams({**config, **({"training_run": linked} if linked else {})})
    experiment = logger.experiment
    experiment.define_metric(STEP)
    for name in ("train/*", "val/*", *recalls, "test/*"):
        experiment.define_metric(name, step_metric=STEP)
    if isinstance(logger, RunLogger):
        logger.best = dict.fromkeys(recalls, float("-inf"))
        for row in read_rows(Path(logger.save_dir) / "metrics.csv"):
            logger.keep_best({name: float(row[name]) for name in recalls if row.get(name)})
        use_weights(experiment, linked)


def log_end(run: TrainingRun, command: Command, metrics: Mapping[str, float]) -> None:
    """Log a table of the metrics, the data and, with `log_checkpoints`, the weights."""
    path = run.directory.path
    for logger in wandb_loggers(run.trainer.loggers):
        key = f"tables/{'val' if command in ('fit', 'validate') else command}"
        logger.log_table(key, columns=["metric", "value"], data=[list(item) for item in metrics.items()])
        if command == run.parts().command:  # not for a test after fit
            use_data(logger.experiment, run.data)
        if command == "fit":
            run.directory.record(**run_facts(logger))
            files = {label: path / "checkpoints" / f"{label}.ckpt" for label in ("best", "last")}
            if run.parts().config.log_checkpoints:
                kept = {label: file for label, file in files.items() if file.is_file()}
                run.directory.record(**log_weights(logger, kept, metrics, path.name))


def log_once(
    folder: Path,
    job: str,
    name: str,
    config: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    pictures: Mapping[str, bytes],
    pages: Mapping[str, Path] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Log tables (rows by key), pictures (PNG) and pages (HTML files) as a separate W&B run, offline without a key.

    `options` are project, entity, group, tags, notes and mode; the group is the name of the run by default.
    """
    given = _given(options)
    mode = given.pop("mode", None) or os.environ.get("WANDB_MODE")
    if mode == "disabled":
        return

    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    init = {"project": project, "group": name, **given, "name": name, "job_type": job}
    with (
        tempfile.TemporaryDirectory() as scratch,
        wandb.init(
            **init, config=dict(config), dir=str(folder.resolve()),
            mode="offline" if offline_wandb(mode) else "online", settings=wandb.Settings(silent=True),
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
