"""Save a W&B workspace with the runs of a project by loss, tau, negatives, day and throughput, and print its address.

Its metrics are those of the runs of the project. Without a W&B key, the workspace is written as JSON to --out
(dashboard.json), and its metrics are those of the runs in --runs.
"""

from __future__ import annotations

import os
from pathlib import Path

from recsys_topk.cli.console import echo, make_parser, warn, write_to
from recsys_topk.reports import workspace
from recsys_topk.runs.wandb.environment import offline_wandb


def main(argv: list[str]) -> None:
    """Save the workspace; without a key, or with `--out` or `--print`, write or print it."""
    parser = make_parser("dashboard", __doc__)
    parser.add_argument("--entity", help="user or team that owns the project (default: yours)")
    project = os.environ.get("WANDB_PROJECT", "recsys-topk")
    parser.add_argument("--project", default=project, help="the project (default: %(default)s)")
    parser.add_argument(
        "--metric", action="append", metavar="NAME",
        help="metric to compare runs by, e.g. joint_recall@5@50; may be repeated (default: the monitored one)",
    )  # fmt: skip
    parser.add_argument("--runs", default="runs", help="folder of the runs with the metrics (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help="print the workspace as JSON instead of saving it")
    parser.add_argument("--out", metavar="FILE", help="write the workspace as JSON instead of saving it")
    options = parser.parse_args(argv)
    no_key = offline_wandb()
    saves = not (no_key or options.print or options.out)
    entity = options.entity or (workspace.default_entity() if saves else "entity")
    metrics = options.metric or (workspace.metrics_of_project(entity, options.project) if saves else [])
    metrics = metrics or workspace.metrics_of_folder(Path(options.runs)) or [workspace.METRIC]
    if saves:
        echo(workspace.save(entity, options.project, metrics))
        return
    text = workspace.spec(workspace.workspace(entity, options.project, metrics))
    if options.print:
        echo(text)
    if options.out or not options.print:
        write_to(options.out or "dashboard.json", text)
        echo(f"written: {options.out or 'dashboard.json'}")
    if no_key:
        warn("not saved: there is no W&B key; set WANDB_API_KEY or run `wandb login`, and run this again")
