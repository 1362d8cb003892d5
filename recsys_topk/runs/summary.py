"""The printed lines of a run: its model at the start, its metrics and the next commands at the end."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recsys_topk.callbacks.resume_point import BestCheckpoint, ResumePoint
from recsys_topk.cascades.features import table_sizes
from recsys_topk.evaluation.list_baselines import Baselines, measure_baselines
from recsys_topk.files import write_whole
from recsys_topk.runs.directory import first_process
from recsys_topk.runs.metrics_file import MetricsFile, read_rows
from recsys_topk.runs.wandb.logger import log_end
from recsys_topk.text import size_text, table
from recsys_topk.trust import class_path

if TYPE_CHECKING:
    from recsys_topk.cascades.module import CascadeModule, Split
    from recsys_topk.runs.run import Command, TrainingRun

LARGEST = 3
FEW_STEPS = 200
FEW_REQUESTS = 400


def table_rows(model: Any) -> list[dict[str, object]]:
    """Return the largest tables of each stage with their rows, dimension and size; shared tables appear once."""
    rows: list[dict[str, object]] = []
    users: dict[Any, list[str]] = {}
    for name, stage in model.cascade.stages.items():
        users.setdefault(stage.embedding, []).append(name)
    for embedding, names in users.items():
        for size in table_sizes(embedding)[:LARGEST]:
            megabytes = cast("float", size.pop("MB"))
            rows.append({"stage": "all" if names[1:] else names[0], **size, "size": size_text(megabytes * 2**20)})
    return rows


def report_start(run: TrainingRun, command: Command) -> None:
    """Log the loss, the stages, the number of parameters, the largest tables and the run directory."""
    model = run.model
    stages = " -> ".join(f"{config.name} ({config.kind}, {config.quota})" for config in model.cascade.configs)
    trained = f"{model.loss.name} under {model.objective.name}" if model.objective.uses_loss else model.objective.name
    run.log_line(f"{command}: {trained}; {stages}")
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    rows = table_rows(model)
    run.log_line(
        f"  {count:,} parameters ({size_text(size)}); {'the largest tables:' if rows else 'no embedding tables'}"
    )
    for line in table(rows).splitlines() if rows else ():
        run.log_line(f"  {line}")
    line = f"  run directory {run.directory.path}"
    if run.resumption is not None:
        dropped = sum(logger.dropped for logger in run.trainer.loggers if isinstance(logger, MetricsFile))
        again = f"; {dropped} later rows of metrics.csv will be logged again" if dropped else ""
        line += f", after step {run.resumption.steps}{again}"
    run.log_line(line)


def report_end(run: TrainingRun, command: Command) -> None:
    """Log the metrics with baselines, the written files and the next commands; log the metrics to W&B as well."""
    if not first_process():
        return
    split = split_of(command)
    shown = {name: value for name, value in run.metrics.items() if name.startswith(f"{split}/")}
    best = next((part for part in run.trainer.checkpoint_callbacks if isinstance(part, BestCheckpoint)), None)
    if command != "fit" or best is None or best.best_model_score is None:
        best = None
    popularity = (
        report_metrics(run, command, shown, None if best is None else best_metrics(run, best)) if shown else None
    )
    if best is not None:
        value = float(best.best_model_score)
        run.log_line(f"best {best.monitor} {value:.4f} (best.ckpt){early_stop(run)}")
        whole = best.monitor is not None and best.monitor.endswith("/corpus")
        requests = run.data.loader(run.data.splits["val"], training=False).requests if whole else None
        for line in advice(run.trainer.global_step, value, popularity, requests):
            run.log_line(line)
    log_end(run, command, shown)
    if command == run.parts().command:
        run.log_line("\n  ".join(["written:", *run.directory.files()]))
    if command == "fit":
        catalogue = getattr(run.data, "negative_source", None) == "catalogue"
        for line in next_commands(run.directory.path, run.model, catalogue):
            run.log_line(line)


def early_stop(run: TrainingRun) -> str:
    """Return why an EarlyStopping ended the run before its last epoch; empty if none did."""
    for part in run.trainer.early_stopping_callbacks:
        if part.stopped_epoch:
            unmoved = f"{part.monitor} did not improve in {part.patience} validations"
            return f"; stopped early after epoch {part.stopped_epoch + 1} of {run.trainer.max_epochs}: {unmoved}"
    return ""


def advice(steps: int, value: float, popularity: float | None, requests: int | None = None) -> list[str]:
    """Return what to try if a run was too short, is not better than popularity, or is measured on few requests.

    Args:
        steps: Number of training steps.
        value: The best value of the monitored metric.
        popularity: The value of a ranking by popularity; None = not known.
        requests: The number of validation requests over which `value`, a share, is a mean; None = enough.

    Example:
        >>> advice(1000, 0.3, 0.1)
        []
    """
    lines = []
    if steps < FEW_STEPS:
        lines.append(
            f"note: only {steps} training steps, too few to learn much; try more epochs (--trainer.max_epochs) or a "
            f"smaller --data.batch_size"
        )
    if popularity is not None and value <= popularity:
        lines.append(
            f"note: the result is not better than ranking by popularity ({popularity:.4f}); try more steps, another "
            f"learning rate (--model.lr), or for users' interactions --config interactions; simple recommenders may be "
            f"better on few data: recsys-topk test --corpus --baselines popularity,transitions,itemknn,als,ease"
        )
    if requests is not None and requests < FEW_REQUESTS:
        error = math.sqrt(max(value * (1 - value), 0.0) / max(requests, 1))
        lines.append(
            f"note: only {requests} validation requests: the result has a standard error of about {error:.3f}, so "
            f"smaller differences between epochs, options or models say nothing"
        )
    return lines


def split_of(command: Command) -> Split:
    """Return the split whose metrics a command reports."""
    return "val" if command in ("fit", "validate") else "test"


def best_metrics(run: TrainingRun, best: BestCheckpoint) -> dict[str, float]:
    """Return the validation metrics at the step of best.ckpt, from metrics.csv; empty if they are not there."""
    score, rows = float(best.best_model_score), read_rows(run.directory.path / "metrics.csv")
    at = next((row["step"] for row in rows if math.isclose(float(row.get(best.monitor) or "nan"), score)), None)
    same = [row for row in rows if row["step"] == at]
    return {name: float(text) for row in same for name, text in row.items() if text and name.startswith("val/")}


def report_metrics(
    run: TrainingRun, command: Command, metrics: Mapping[str, float], best: Mapping[str, float] | None = None
) -> float | None:
    """Log the metrics of a command in one table with those of random order, popularity and the oracle.

    If the metrics of best.ckpt (`best`) are others than the last ones, both are shown. Metrics over the whole
    catalogue (`--corpus`) have other baselines and get a second table.

    Returns:
        The monitored metric of a ranking by popularity, if it was measured.
    """
    model, data, split = run.model, run.data, split_of(command)
    baselines = Baselines({}, 0)
    shards = [name for name in data.splits[split] if name != split]
    days = f" {' to '.join(dict.fromkeys((shards[0], shards[-1])))}" if shards else ""
    where = f"{split}{days}: {data.lists_text(split)}"
    result: dict[str, Any] = {"command": run.typed(command), "seconds": round(time.monotonic() - run.started, 1)}
    if run.parts().options["baselines"]:
        batches = run.trainer.num_val_batches if split == "val" else run.trainer.num_test_batches
        try:
            baselines = measure_baselines(model, data, split, int(batches[0]))
            where += f"; baselines on {baselines.requests:,} requests"
            where += "" if "popularity" in baselines.metrics else ", without popularity: there are no training data"
        except Exception as error:  # the metrics of the run are shown even if a user's data module fails here
            where += f"; no baselines: {type(error).__name__}: {error}"
    result |= {"objective": model.objective.name, "baselines": baselines.metrics}
    write_whole(run.directory.path / "result.json", json.dumps(result, indent=1) + "\n")
    both = best is not None and any(best.get(name, value) != value for name, value in metrics.items())
    shown = {"best": best or {}, "last": metrics} if both else {"this run": metrics}
    catalogue = {name: value for name, value in metrics.items() if re.search(r"/.*/\D", name)}
    rows: list[dict[str, object]] = []
    for name in (name for name in metrics if name not in catalogue):
        metric = name.split("/")[1]
        others = {ranker: values.get(metric) for ranker, values in baselines.metrics.items()}
        rows.append({"metric": metric, **{column: values.get(name) for column, values in shown.items()}, **others})
    _log_table(run, where, rows)
    quotas, k, right = " -> ".join(map(str, model.cascade.quotas)), model.k, baselines.right
    few = f"right items left after {quotas}; a list holds {right:.3g} of them on average, and at most {k} count"
    all_k = f"{k} right items left after {quotas}"
    run.log_line(f"joint recall: share of the {few if 0 < right < 0.95 * k else all_k}")
    if catalogue:
        _log_table(
            run, f"{split}: the whole catalogue", corpus_rows(catalogue, {} if best is None or not both else best)
        )
    if model.monitor.endswith("/corpus"):
        return metrics.get(f"{split}/{model.monitor.removesuffix('corpus')}popularity")
    return baselines.metrics.get("popularity", {}).get(model.monitor)


def corpus_rows(metrics: Mapping[str, float], best: Mapping[str, float]) -> list[dict[str, object]]:
    """Return metrics over the whole catalogue as rows of a table, one column per ranker; `best`: those of best.ckpt.

    Example:
        >>> corpus_rows({"val/ndcg@5/corpus": 0.1, "val/ndcg@5/random": 0.01}, {"val/ndcg@5/corpus": 0.2})
        [{'metric': 'ndcg@5', 'best': 0.2, 'last': 0.1, 'random': 0.01}]
    """
    rows: dict[str, dict[str, object]] = {}
    for name, value in metrics.items():
        _, metric, ranker = name.split("/", 2)
        row = rows.setdefault(metric, {"metric": metric})
        if ranker == "corpus" and best:
            row |= {"best": best.get(name), "last": value}
        else:
            row["this run" if ranker == "corpus" else ranker] = value
    return list(rows.values())


def _log_table(run: TrainingRun, title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Log a table of rankers: random order, baselines, this run, and what it is compared with (oracle, index)."""
    rankers = dict.fromkeys(name for row in rows for name in row)
    first, last = ("metric", "random", "popularity"), ("this run", "best", "last", "oracle", "index")
    between = [name for name in rankers if name not in (*first, *last)]
    run.log_line(f"\n{title}")
    run.log_line(table(rows, [name for name in (*first, *between, *last) if name in rankers]))


def next_commands(path: Path, model: CascadeModule, catalogue: bool = False) -> list[str]:
    """Return useful commands after training, with the paths of the run; none without a checkpoint.

    Args:
        path: The run directory.
        model: The trained model; the `compare` command trains its loss and another one.
        catalogue: It was trained against the whole catalogue, as few losses can: no `compare` command.
    """
    files = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
    checkpoint = next((shlex.quote(str(file)) for file in files if file.is_file()), None)
    if checkpoint is None:
        return []
    lines = ["next:", f"  recsys-topk test --ckpt_path {checkpoint}{' --corpus' if catalogue else ''}"]
    path_of_loss = class_path(type(model.loss))
    name = getattr(model.loss, "name", None) if path_of_loss.startswith("recsys_topk.") else path_of_loss
    if model.objective.uses_loss and name is not None and not catalogue:
        config, other = shlex.quote(str(path / "config.yaml")), "dftopk" if name == "listnet" else "listnet"
        out = shlex.quote(str(path.parent / f"compare-{path.name}"))  # not the folder of another comparison
        lines.append(f"  recsys-topk compare --config {config} --losses {name},{other} --out {out}")
    export = shlex.quote(str(path / "export"))
    return [*lines, f"  recsys-topk export --ckpt_path {checkpoint} --out {export}"]


def report_stop(run: TrainingRun) -> None:
    """Log the metrics so far and the command that resumes the run."""
    if run.metrics:
        run.log_line(table([{"metric so far": name, "value": value} for name, value in run.metrics.items()]))
    step = run.trainer.global_step
    point = next((part for part in run.trainer.checkpoint_callbacks if isinstance(part, ResumePoint)), None)
    if point is None or point.saved_step is None or not point.path.is_file():
        run.log_line(f"stopped after step {step}, before the first checkpoint")
        return
    run.log_line(f"stopped after step {step}; {point.path} holds step {point.saved_step}. Resume it with:")
    run.log_line(f"  recsys-topk fit --resume {shlex.quote(str(run.directory.path))}")
