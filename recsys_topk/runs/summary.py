"""What a run says before it begins and when it has ended, or was stopped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint
from recsys_topk.cascades.features import table_sizes
from recsys_topk.runs.directory import first_process
from recsys_topk.runs.metrics_file import MetricsFile
from recsys_topk.runs.text import size_text, table
from recsys_topk.runs.wandb_logging import log_end

if TYPE_CHECKING:
    from recsys_topk.runs.run import Command, TrainingRun

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


def announce(run: TrainingRun, command: Command) -> None:
    """Say what is trained or measured, how large it is, and where the run goes."""
    model = run.model
    stages = " -> ".join(f"{config.name} ({config.kind}, {config.quota})" for config in model.cascade.configs)
    trained = f"{model.loss.name} under {model.objective.name}" if model.objective.uses_loss else model.objective.name
    run.say(f"{command}: {trained}; {stages}")
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    rows = table_rows(model)
    run.say(f"  {count:,} parameters ({size_text(size)}); {'the largest tables:' if rows else 'no embedding tables'}")
    for line in table(rows).splitlines() if rows else ():
        run.say(f"  {line}")
    where = f"  run directory {run.directory.path}"
    if run.resumption is not None:
        dropped = sum(logger.dropped for logger in run.trainer.loggers if isinstance(logger, MetricsFile))
        again = f"; {dropped} rows of metrics.csv that came later will be logged again" if dropped else ""
        where += f", after step {run.resumption.steps}{again}"
    run.say(where)


def report_end(run: TrainingRun, command: Command) -> None:
    """Say what was reached and what was written; let W&B have it too."""
    if not first_process():
        return
    shown = {name: value for name, value in run.metrics.items() if not name.startswith("train/")}
    if shown:
        run.say(table(metric_rows(shown)))
    best = next((part for part in run.trainer.checkpoint_callbacks if isinstance(part, BestCheckpoint)), None)
    if command == "fit" and best is not None and best.best_model_score is not None:
        run.say(f"best {best.monitor} {float(best.best_model_score):.4f} (best.ckpt)")
    log_end(run, command, shown)
    if command == run.parts().command:
        run.say("\n  ".join(["written:", *run.directory.files()]))


def metric_rows(metrics: Mapping[str, float]) -> list[dict[str, object]]:
    """Return metrics as rows of a table; with metrics over the whole catalogue, one column per set of candidates.

    Example:
        >>> metric_rows({"test/ndcg@5/200": 0.5, "test/ndcg@5/corpus": 0.1, "test/ndcg@5/random": 0.01})
        [{'metric': 'test/ndcg@5', '200': 0.5, 'corpus': 0.1, 'random': 0.01}]
    """
    if not any(name.endswith("/corpus") for name in metrics):
        return [{"metric": name, "value": value} for name, value in metrics.items()]
    rows: dict[str, dict[str, object]] = {}
    for name, value in metrics.items():
        split, metric, *column = name.split("/")
        row = rows.setdefault(f"{split}/{metric}", {"metric": f"{split}/{metric}"})
        row["/".join(column) or "sampled"] = value
    return list(rows.values())


def report_stop(run: TrainingRun) -> None:
    """Say what was reached until training was stopped, and the command that resumes it."""
    if run.metrics:
        run.say(table([{"metric so far": name, "value": value} for name, value in run.metrics.items()]))
    step = run.trainer.global_step
    point = next((part for part in run.trainer.checkpoint_callbacks if isinstance(part, ResumePoint)), None)
    if point is None or point.saved_step is None or not point.path.is_file():
        run.say(f"stopped after step {step}, before the first checkpoint")
        return
    run.say(f"stopped after step {step}; {point.path} holds step {point.saved_step}. Resume it with:")
    run.say(f"  recsys-topk fit --resume {shlex.quote(str(run.directory.path))}")
