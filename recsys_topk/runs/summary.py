"""What a training command says before it begins and when it has ended, or was stopped."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint
from recsys_topk.cascades.features import table_sizes
from recsys_topk.cli.console import echo, table
from recsys_topk.runs.directory import first_process
from recsys_topk.runs.metrics_file import MetricsFile, read_rows
from recsys_topk.runs.wandb_logging import log_summary, log_table, log_weights, wandb_loggers

if TYPE_CHECKING:
    from recsys_topk.runs.lightning_cli import CascadeCLI

LARGEST = 3


def table_rows(model: Any) -> list[dict[str, object]]:
    """Return the largest tables of each stage: rows, dimension and megabytes; shared tables once."""
    rows: list[dict[str, object]] = []
    seen: set[int] = set()
    for name, stage in model.cascade.stages.items():
        if id(stage.embedding) in seen:
            continue
        seen.add(id(stage.embedding))
        shared = sum(other.embedding is stage.embedding for other in model.cascade.stages.values()) > 1
        sizes = table_sizes(stage.embedding)
        rows += [{"stage": "all" if shared else name, **size} for size in sizes[:LARGEST]]
    return rows


def announce(cli: CascadeCLI) -> None:
    """Say what is trained or measured, how large it is, and where the run goes."""
    if not first_process():
        return
    model = cli.model
    stages = " -> ".join(f"{config.name} ({config.kind}, {config.quota})" for config in model.cascade.configs)
    trained = f"{model.loss.name} under {model.objective.name}" if model.objective.uses_loss else model.objective.name
    echo(f"{cli.subcommand}: {trained}; {stages}")
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
    echo(f"  {count:,} parameters ({size:,.1f} MB); the largest tables:")
    for line in table(table_rows(model)).splitlines():
        echo(f"  {line}")
    if cli.resumption is None:
        echo(f"  run directory {cli.run.path}")
        return
    dropped = sum(logger.dropped for logger in cli.trainer.loggers if isinstance(logger, MetricsFile))
    again = f"; {dropped} rows of metrics.csv that came later will be logged again" if dropped else ""
    echo(f"  run directory {cli.run.path}, after step {cli.resumption.steps}{again}")


def report_end(cli: CascadeCLI) -> None:
    """Print what was reached and what was written; let W&B have it too."""
    if not first_process():
        return
    metrics = _metrics(cli)
    shown = {name: value for name, value in metrics.items() if not name.startswith("train/")}
    if shown:
        echo(table([{"metric": name, "value": value} for name, value in shown.items()]))
    best = next((part for part in cli.trainer.checkpoint_callbacks if isinstance(part, BestCheckpoint)), None)
    if best is not None and best.best_model_score is not None:
        echo(f"best {best.monitor} {float(best.best_model_score):.4f} (best.ckpt)")
    for logger in wandb_loggers(cli.trainer.loggers):
        log_table(logger, f"tables/{'val' if cli.subcommand in ('fit', 'validate') else cli.subcommand}", shown)
        if cli.subcommand == "fit":
            log_summary(logger, read_rows(cli.run.path / "metrics.csv"))
        if cli.subcommand == "fit" and cli.config["fit"].log_checkpoints:
            found = {label: cli.run.path / "checkpoints" / f"{label}.ckpt" for label in ("best", "last")}
            log_weights(logger, cli.run.path.name, {k: path for k, path in found.items() if path.is_file()}, shown)
    cli.run.echo_files()


def report_stop(cli: CascadeCLI) -> None:
    """Print what was reached until training was stopped, and the command that goes on."""
    if not first_process():
        return
    metrics = _metrics(cli)
    if metrics:
        echo(table([{"metric so far": name, "value": value} for name, value in metrics.items()]))
    if cli.subcommand != "fit":
        return
    point = next((part for part in cli.trainer.checkpoint_callbacks if isinstance(part, ResumePoint)), None)
    if point is None or point.saved_step is None or not point.path.is_file():
        echo(f"stopped after step {cli.trainer.global_step}, before the first checkpoint")
        return
    echo(f"stopped after step {cli.trainer.global_step}; {point.path} holds step {point.saved_step}. Go on with:")
    echo(f"  recsys-topk fit --resume {shlex.quote(str(cli.run.path))}")


def _metrics(cli: CascadeCLI) -> dict[str, float]:
    return {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
