"""Comparisons: several variants on the same data and batches, with seeds, standard deviation and paired tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.files import csv_text, write_whole
from recsys_topk.reports import plots
from recsys_topk.runs.run import LogLine, TrainingRun
from recsys_topk.runs.statistics import Runs, metric_names, summarise
from recsys_topk.runs.trials import Competition, Send, Trial, by_label, measure_seconds, run_all
from recsys_topk.runs.wandb.logger import log_once
from recsys_topk.text import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compare(competition: Competition, facts: Mapping[str, Any], log_line: LogLine) -> None:
    """Run the trials that have no result yet, then print and write the table and the plots."""
    trials = competition.trials("trials")
    todo = [trial for trial in trials if not trial.read()]
    run_all(train_and_test, todo, len(trials), competition, outcome, log_line)
    results = {label: [trial.read() for trial in runs] for label, runs in by_label(trials).items()}
    rows = comparison_rows(results)
    publish(competition, rows, {"runs": results, **facts}, trials[0], log_line)


def publish(
    competition: Competition,
    rows: Sequence[Mapping[str, Any]],
    content: Mapping[str, Any],
    trial: Trial,
    log_line: LogLine,
) -> None:
    """Print the table of a comparison, and write and log its rows, its further content and its plots.

    The options of W&B are those of `trial`, any of its runs.
    """
    log_line(table(rows))
    lists = {result["lists"]: None for runs in content["runs"].values() for result in runs if "lists" in result}
    if lists:
        log_line(f"test: {'; '.join(lists)}")
    folder = competition.out
    written, figures = write_results(
        folder, "comparison", {"rows": rows, **content}, rows, lambda: draw(rows), log_line
    )
    if competition.logger == "wandb":
        pictures = {name: plots.png(figure) for name, figure in figures.items()}
        facts = {name: value for name, value in content.items() if name != "runs"}
        tables = {"comparison": rows}
        log_once(folder, "compare", folder.name, facts, tables, pictures, options=trial.place["wandb"])
    log_line(written)


def write_results(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    draw: Callable[[], Mapping[str, Figure]],
    log_line: LogLine,
) -> tuple[str, Mapping[str, Figure]]:
    """Write NAME.json, NAME.csv and the plots as SVG. Return a line that names the files, and the plots.

    `draw` returns the plots by file name. Without matplotlib there are none, and a line says so.
    """
    try:
        figures = draw()
    except ImportError as error:
        log_line(f"no plots: {error}")
        figures = {}
    files = {f"{name}.json": json.dumps(content, indent=1), f"{name}.csv": csv_text(rows)}
    files |= {f"{plot}.svg": plots.svg(figure) for plot, figure in figures.items()}
    for file, text in files.items():
        write_whole(folder / file, text)
    return f"written: {', '.join(str(folder / file) for file in files)}", figures


def train_and_test(trial: Trial, send: Send) -> None:
    """Train and test one run, and write its metrics to the file of the trial.

    `seconds` is the training time. It does not include the preparation of the data.
    """
    run = trial.run()
    run.data.prepare_data()
    seconds = measure_seconds(run.fit)
    metrics = {name: value for name, value in run.test().items() if name.startswith("test/")}
    metrics |= further_tests(trial, run)
    result = {"seconds": seconds, "metrics": metrics, "device": device(run), "lists": run.data.lists_text("test")}
    result["config"] = _given(run.parts().options)
    write_whole(trial.target, json.dumps({**trial.identity(), **result}, indent=1))


def further_tests(trial: Trial, run: TrainingRun) -> dict[str, float]:
    """Test the weights of a run again with the options of each further test; return the first metric of each.

    The name of a metric starts with that of its test, e.g. ``logged/joint_recall@10@20/40``.
    """
    metrics = {}
    for name in trial.tests:
        other = trial.run(name)
        other.data.prepare_data()
        other.model.load_state_dict(run.model.state_dict())
        first = {metric: value for metric, value in other.test().items() if metric.startswith("test/")}
        metric, value = next(iter(first.items()))
        metrics[f"{name}/{metric.removeprefix('test/')}"] = value
    return metrics


def _given(value: Any) -> Any:
    """Return the options that are not None."""
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return value


def device(run: TrainingRun) -> str:
    """Return the device of a run: ``cpu``, or the name of the GPU."""
    import torch

    place = run.trainer.strategy.root_device
    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place.type)


def outcome(trial: Trial) -> str:
    """Return a summary of a finished run."""
    result = trial.read()
    joint = next(iter(result["metrics"].values()))
    return f"{joint:.4f} ({result['seconds']:.0f} s)"


def comparison_rows(results: Runs) -> list[dict[str, Any]]:
    """Return the rows of the comparison table: the result of `summarise` with metric names as columns."""
    joint = metric_names(results)[0]
    return [
        {"run": row["run"], joint: row["joint"], "+-": row["+-"], "p": row["p"], **row["alone"],
         "seconds": row["seconds"]}
        for row in summarise(results)
    ]  # fmt: skip


def draw(rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Return the plots of a comparison, by file name.

    They show the joint recall with its standard deviation, the recall of each stage next to the joint recall, and the
    joint recall against the training time.
    """
    joint, *alone = (name for name in rows[0] if name.startswith("test/"))
    short = {name: name.removeprefix("test/").partition("/")[0].replace("_", " ") for name in (joint, *alone)}
    stages = {str(row["run"]): [(short[name], row[name]) for name in (*alone, joint)] for row in rows}
    cost = {str(row["run"]): [(row["seconds"], row[joint])] for row in rows}
    items = joint.rpartition("/")[2]
    return {
        "comparison-joint": plots.bars(
            rows, joint, "+-", title="Mean over seeds and standard deviation",
            xlabel=f"{short[joint]}, lists of {items}",
        ),
        "comparison-stages": plots.lines(
            stages, ylabel=f"mean over seeds, lists of {items}", title="Each stage alone, and the cascade"
        ),
        "comparison-seconds": plots.lines(
            cost, xlabel="seconds of training", ylabel=short[joint], title="Recall against training time"
        ),
    }  # fmt: skip
