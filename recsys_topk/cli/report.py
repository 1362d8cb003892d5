"""`recsys-topk report RUNS...`: one self-contained HTML page of whatever the other commands left."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recsys_topk.cli.console import echo
from recsys_topk.reports.results import Found, find_all
from recsys_topk.runs.files import write_whole
from recsys_topk.runs.provenance import provenance


def main(argv: list[str]) -> int:
    """Write the page, and log its tables and plots to W&B if asked to."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk report",
        description="Make one HTML page, with nothing to fetch, of folders of experiment, compare, stream and fit, and "
        "of files of bench --json. What is unfinished is shown as far as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="folders or files; folders are searched")
    parser.add_argument("--out", default="report.html", help="the page (default: %(default)s)")
    parser.add_argument("--title", default="recsys_topk: results", help="its heading (default: %(default)s)")
    parser.add_argument("--logger", choices=["wandb"], help="log tables and plots to W&B too (offline without a key)")
    options = parser.parse_args(argv)
    target = Path(options.out)
    if target.is_dir():
        raise ValueError(f"--out {options.out!r} is a folder; give a file, e.g. --out {target / 'report.html'}")
    found = in_order(find_all(options.runs))
    from recsys_topk.reports.page import describe, render
    from recsys_topk.reports.sections import section_of

    facts = provenance(["recsys-topk", "report", *argv])
    machine = f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores"
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sections = [section_of(one) for one in found]
    write_whole(target, render(options.title, describe(found, when, facts["versions"], machine), sections))
    for section in sections:
        echo(f"{section.title}: {' '.join(section.verdict[:1])}")
        for text in section.missing:
            echo(f"  missing: {text}")
    if options.logger == "wandb":
        log_to_wandb(target, sections, facts)
    echo(f"written: {target}  ({target.stat().st_size / 1024:.0f} KB)")
    return 0


def in_order(found: Sequence[Found]) -> list[Found]:
    """Return experiments in their own order, then everything else as it was found."""
    from recsys_topk.experiments.definition import available

    names = available()
    experiments = [one for one in found if one.kind == "experiment"]
    experiments.sort(key=lambda one: names.index(one.content["name"]))
    return [*experiments, *(one for one in found if one.kind != "experiment")]


def log_to_wandb(target: Path, sections: Sequence[Any], facts: dict[str, Any]) -> None:
    """Log the page, and every table and plot of it, as one W&B run; offline without a key."""
    import tempfile

    import wandb

    from recsys_topk.reports import plots
    from recsys_topk.reports.page import anchors
    from recsys_topk.runs.directory import offline_wandb

    with (
        tempfile.TemporaryDirectory() as scratch,
        wandb.init(
            project="recsys-topk", name=target.stem, job_type="report", dir=str(target.parent), config=facts,
            mode="offline" if offline_wandb() else "online", settings=wandb.Settings(silent=True),
        ) as run,
    ):  # fmt: skip
        logged: dict[str, Any] = {"report/page": wandb.Html(str(target))}
        for name, section in zip(anchors([one.title for one in sections]), sections, strict=True):
            for number, table in enumerate(section.tables, start=1):
                columns = [column.name for column in table.columns]
                logged[f"report/{name}/table-{number}"] = wandb.Table(columns, [list(row) for row in table.rows])
            for number, (figure, caption) in enumerate(section.figures, start=1):
                picture = Path(scratch) / f"{name}-{number}.png"
                plots.write_png(picture, plots.png(figure))
                logged[f"report/{name}/plot-{number}"] = wandb.Image(str(picture), caption=caption)
        run.log(logged)
    for folder in sorted(target.parent.glob("wandb/offline-run-*"))[-1:]:
        echo(f"logged to {folder}  (upload with: wandb sync {folder})")
