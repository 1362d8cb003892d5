"""`recsys-topk compare`: several losses on the same data and batches, with seeds, spread and paired significance."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys_topk.cli.console import echo, table, warn
from recsys_topk.runs.files import csv_text, write_whole
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.trials import Trial, add_options, by_label, plan, run_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(argv: list[str]) -> int:
    """Run what has not been run yet, then print and write the table and the plots."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk compare",
        description="Train several losses on the same data and batch order, with seeds, spread and a paired test. "
        "Further options go to every `recsys-topk fit`. Finished runs are kept: an interrupted "
        "comparison goes on where it was.",
        allow_abbrev=False,
    )
    add_options(parser, out="runs/compare")
    options, further = parser.parse_known_args(argv)
    facts = provenance(["recsys-topk", "compare", *argv])
    trials = plan(options, further)
    todo = [trial for trial in trials if trial.read() is None]
    from recsys_topk.experiments.compare import train_and_test

    folder = Path(options.out)
    run_all(train_and_test, todo, len(trials), options.jobs, folder.name, outcome)
    results = {label: [measured(trial) for trial in runs] for label, runs in by_label(trials).items()}
    rows = summarise(results)
    echo(table(rows))
    resolved = {"losses": options.losses, "variant": options.variant, "seeds": options.seeds, "further": further}
    content = {"rows": rows, "runs": results, **facts, "arguments": resolved}
    write_whole(folder / "comparison.json", json.dumps(content, indent=1))
    write_whole(folder / "comparison.csv", csv_text(rows))
    drawn = draw(folder, rows)
    if options.logger == "wandb":
        log_to_wandb(folder, rows, drawn, content)
    written = ["comparison.json", "comparison.csv", *(f"{name}.svg" for name in drawn)]
    echo(f"written: {', '.join(str(folder / name) for name in written)}")
    return 0


def measured(trial: Trial) -> dict[str, Any]:
    """Return the numbers of a run that is over."""
    found = trial.read()
    assert found is not None
    return found


def outcome(trial: Trial) -> str:
    """Return what to say of a run that is over."""
    found = measured(trial)
    joint = next(iter(found["metrics"].values()))
    return f"{joint:.4f} ({found['seconds']:.0f} s)"


def draw(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Write the plots of a comparison, or say why there are none; return the figures by file name.

    They show the joint recall with its spread, the recalls of each stage alone beside the joint one, and the joint
    recall against the time of the training.
    """
    from recsys_topk.reports import plots

    joint, *alone = (name for name in rows[0] if name.startswith("test/"))
    short = {name: name.removeprefix("test/").partition("/")[0].replace("_", " ") for name in (joint, *alone)}
    stages = {str(row["run"]): [(short[name], row[name]) for name in (*alone, joint)] for row in rows}
    cost = {str(row["run"]): [(row["seconds"], row[joint])] for row in rows}
    items = joint.rpartition("/")[2]
    try:
        made = {
            "comparison-joint": plots.bars_figure(
                rows,
                joint,
                "+-",
                title="Mean over seeds and standard deviation",
                xlabel=f"{short[joint]}, lists of {items}",
            ),
            "comparison-stages": plots.lines_figure(
                stages, ylabel=f"mean over seeds, lists of {items}", title="Each stage alone, and the cascade"
            ),
            "comparison-seconds": plots.lines_figure(
                cost, xlabel="seconds of training", ylabel=short[joint], title="What it costs"
            ),
        }
    except ImportError as error:
        warn(f"no plots: {error}")
        return {}
    for name, figure in made.items():
        plots.write_svg(folder / f"{name}.svg", plots.svg(figure))
    return made


def log_to_wandb(
    folder: Path, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Figure], content: Mapping[str, Any]
) -> None:
    """Log the table and the plots as one W&B run, offline without a key."""
    import wandb

    from recsys_topk.reports import plots
    from recsys_topk.runs.directory import offline_wandb

    columns = list(rows[0])
    config = {name: content[name] for name in ("command", "versions", "machine", "started", "arguments")}
    with wandb.init(
        project="recsys-topk", name=folder.name, group=folder.name, job_type="compare", config=config,
        dir=str(folder.resolve()), mode="offline" if offline_wandb() else "online",
        settings=wandb.Settings(silent=True),
    ) as run:  # fmt: skip
        logged: dict[str, Any] = {"comparison": wandb.Table(columns, [[row[name] for name in columns] for row in rows])}
        for name, figure in figures.items():
            path = folder / f"{name}.png"
            plots.write_png(path, plots.png(figure))
            logged[name] = wandb.Image(str(path.resolve()))
        run.log(logged)


def summarise(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each competitor: means over seeds, and a paired test against the first competitor.

    `+-` is the standard deviation over seeds of the first metric (the joint recall), and `p` that of a paired
    two-sided t-test on it over seeds.
    """
    first = next(iter(results))
    names = list(results[first][0]["metrics"])
    rows = []
    for label, runs in results.items():
        values = {name: [run["metrics"][name] for run in runs] for name in names}
        joint, *alone = names
        baseline = [run["metrics"][joint] for run in results[first]]
        differences = [a - b for a, b in zip(values[joint], baseline, strict=True)]
        row: dict[str, Any] = {"run": label, joint: statistics.fmean(values[joint])}
        row["+-"] = statistics.stdev(values[joint]) if len(runs) > 1 else None
        row["p"] = None if label == first else paired_p_value(differences)
        row |= {name: statistics.fmean(values[name]) for name in alone}
        row["seconds"] = statistics.fmean(run["seconds"] for run in runs)
        rows.append(row)
    return rows


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p of a t-test that the mean of `differences` is 0; None for fewer than two of them.

    The distribution function of Student's t with n degrees of freedom, by its finite series (Abramowitz and Stegun
    26.7.3, 26.7.4).

    Example:
        >>> round(paired_p_value([1.0, 2.0, 3.0]), 4)
        0.0742
    """
    if len(differences) < 2:
        return None
    spread = statistics.stdev(differences)
    if spread == 0.0:
        return 1.0 if statistics.fmean(differences) == 0.0 else 0.0
    n = len(differences) - 1
    t = abs(statistics.fmean(differences)) / (spread / math.sqrt(len(differences)))
    angle = math.atan(t / math.sqrt(n))
    cosine = math.cos(angle)
    if n % 2:
        term, series = cosine, 0.0
        for j in range(1, n - 1, 2):
            series += term
            term *= cosine * cosine * (j + 1) / (j + 2)
        inside = (angle + math.sin(angle) * series) * 2 / math.pi
    else:
        term, series = 1.0, 0.0
        for j in range(0, n, 2):
            series += term
            term *= cosine * cosine * (j + 1) / (j + 2)
        inside = math.sin(angle) * series
    return 1.0 - inside
