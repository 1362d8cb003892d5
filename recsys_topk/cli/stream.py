"""`recsys-topk stream`: day by day, test on a day and then train on it, for several losses."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from recsys_topk.cli.console import echo, table, warn
from recsys_topk.runs.files import csv_text, write_whole
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.trials import Trial, add_options, by_label, plan, run_all

Runs: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]


def main(argv: list[str]) -> int:
    """Run the days that have not been run yet, with a line for each, then print and write the curves."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk stream",
        description="Go through the days in order: test on each with what was learned before it, then train on it "
        "(--trainer.max_epochs passes). The first day is trained on only. Optimizer and schedule carry over. Further "
        "options go to `recsys-topk fit`. A stream that was interrupted, or has got new days, goes on where it was.",
        allow_abbrev=False,
    )
    add_options(parser, out="runs/stream")
    options, further = parser.parse_known_args(argv)
    facts = provenance(["recsys-topk", "stream", *argv])
    trials = plan(options, further, "days")
    for trial in trials:
        trial.read()  # raises before anything runs if one of them was made with other options
    from recsys_topk.experiments.stream import stream_days

    folder = Path(options.out)
    rows = DayRows(max(len(trial.label) for trial in trials))

    def done(trial: Trial) -> str:
        write(folder, {**facts, "runs": collect(trials)})
        found = trial.read()
        assert found is not None
        return f"{len(found['days'])} days tested, mean {mean_joint(found):.4f}"

    run_all(stream_days, trials, len(trials), options.jobs, folder.name, done, rows.heard)
    runs = collect(trials)
    echo(table(curve_table(runs)))
    written = write(folder, {**facts, "runs": runs})
    echo(f"written: {', '.join(map(str, written))}")
    return 0


class DayRows:
    """A table that grows by a line for each day of each run.

    Args:
        width: Width of the first column.
    """

    def __init__(self, width: int) -> None:
        self.width = max(width, len("run"))
        self.head = False

    def heard(self, trial: Trial, entry: Mapping[str, Any]) -> None:
        """Print a day, with dashes for the first, which is not tested."""
        names = entry["names"]
        if not self.head:
            self.head = True
            echo("  ".join([*self._cells("run", "seed", "day", "requests"), *names, "seconds"]))
        cells = self._cells(trial.label, str(trial.seed), entry["day"], str(entry["requests"]))
        metrics = entry.get("metrics")
        cells += [(f"{metrics[name]:.4f}" if metrics else "-").rjust(len(name)) for name in names]
        echo("  ".join([*cells, f"{entry['seconds']:.1f}".rjust(len("seconds"))]))

    def _cells(self, label: str, seed: str, day: str, requests: str) -> list[str]:
        return [label.ljust(self.width), seed.rjust(4), day.ljust(10), requests.rjust(8)]


def collect(trials: Sequence[Trial]) -> dict[str, list[dict[str, Any]]]:
    """Return what has been measured so far, by label: seed, arguments, the first day, and the days tested."""
    kept = ("seed", "arguments", "first", "days")
    found = {label: [trial.read() for trial in runs] for label, runs in by_label(trials).items()}
    return {
        label: [{name: record[name] for name in kept} for record in records if record is not None]
        for label, records in found.items()
    }


def mean_joint(record: Mapping[str, Any]) -> float:
    """Return the mean over days of the first metric, the joint recall; NaN for no day."""
    values = [next(iter(entry["metrics"].values())) for entry in record["days"]]
    return statistics.fmean(values) if values else float("nan")


def curves(runs: Runs) -> dict[str, dict[str, list[float]]]:
    """Return the joint recall of each seed, by label and day."""
    found: dict[str, dict[str, list[float]]] = {}
    for label, records in runs.items():
        for record in records:
            for entry in record["days"]:
                joint = next(iter(entry["metrics"].values()))
                found.setdefault(label, {}).setdefault(entry["day"], []).append(joint)
    return found


def curve_table(runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each day: the joint recall of each competitor, averaged over seeds; the last row is the mean."""
    found = curves(runs)
    days = sorted({day for by_day in found.values() for day in by_day})
    rows: list[dict[str, Any]] = []
    for day in days:
        means = {label: statistics.fmean(by_day[day]) for label, by_day in found.items() if day in by_day}
        rows.append({"day": day, **means})
    mean = {
        label: statistics.fmean(statistics.fmean(values) for values in by_day.values())
        for label, by_day in found.items()
    }
    return [*rows, {"day": "mean", **mean}] if rows else []


def write(folder: Path, content: Mapping[str, Any]) -> list[Path]:
    """Write stream.json, stream.csv (a line for each run and day) and stream.svg; return their paths."""
    runs: Runs = content["runs"]
    write_whole(folder / "stream.json", json.dumps(content, indent=1))
    lines = [
        {"run": label, "seed": record["seed"], "day": entry["day"], "requests": entry["requests"],
         "seconds": entry["seconds"], **entry["metrics"]}
        for label, records in runs.items() for record in records for entry in record["days"]
    ]  # fmt: skip
    write_whole(folder / "stream.csv", csv_text(lines))
    written = [folder / "stream.json", folder / "stream.csv"]
    if lines:
        try:
            write_whole(folder / "stream.svg", draw(runs))
            written.append(folder / "stream.svg")
        except ImportError as error:
            warn(f"no plot: {error}")
    return written


def draw(runs: Runs) -> str:
    """Return the joint recall by day as SVG: means over seeds, in bands of their standard deviation."""
    from recsys_topk.reports import plots

    found = curves(runs)
    lines = {label: [(day, statistics.fmean(v)) for day, v in by_day.items()] for label, by_day in found.items()}
    bands = {}
    for label, by_day in found.items():
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_day.values()]
        means = [mean for _, mean in lines[label]]
        if any(spread):
            bands[label] = (
                [m - s for m, s in zip(means, spread, strict=True)],
                [m + s for m, s in zip(means, spread, strict=True)],
            )
    entry = next(entry for records in runs.values() for record in records for entry in record["days"])
    joint = next(iter(entry["metrics"])).replace("_", " ")
    return plots.lines(
        lines, ylabel=f"{joint}, lists of {entry['candidates']}", bands=bands,
        title="Each day tested with what was learned before it" + (" (mean, standard deviation)" if bands else ""),
    )  # fmt: skip
