"""`recsys-topk quotas`: joint recall and cost as a function of the quotas of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.text import table

SHOWN = 40


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser(
        "quotas",
        "Measure the joint recall over the whole catalogue for many quotas, and the time of each stage per item "
        "on this machine. Writes quotas.json, quotas.svg and quotas.png with the Pareto front.",
    )
    parser.add_argument("--ckpt_path", dest="checkpoint", required=True, help="checkpoint of a fit")
    parser.add_argument("--grid", action="append", default=[], metavar="STAGE=N,N", help="quotas to try; repeatable")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="requests (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=10_000, help="at most about so many (default: %(default)s)")
    parser.add_argument("--data.root", dest="root", help="current folder of the data (default: as in training)")
    parser.add_argument("--out", help="folder to write (default: quotas in the folder of the run)")
    parser.add_argument("--trust", action="append", default=[], help="package whose classes the checkpoint may name")
    args = parser.parse_args(argv)
    grid = dict(_stage_quotas(text) for text in args.grid)
    if args.requests < 1:
        raise ValueError(f"--requests must be at least 1, got {args.requests}")

    from recsys_topk.evaluation.quotas import study_quotas
    from recsys_topk.files import write_whole
    from recsys_topk.reports.plots import front, png, svg
    from recsys_topk.runs.deploy import open_checkpoint

    model, data, _ = open_checkpoint(args.checkpoint, root=args.root, trust=args.trust)
    study = study_quotas(model, data, args.split, grid=grid, requests=args.requests)
    recall = f"joint recall@{study.k}"
    shown = [point for point in study.points if point.on_front or point.quotas == study.current]
    rows = [
        {
            **dict(zip(study.stages, point.quotas, strict=True)),
            recall: point.recall,
            "us per request": round(point.cost),
            "": " ".join(("front" * point.on_front, "now" * (point.quotas == study.current))).strip(),
        }
        for point in (study.points if len(study.points) <= SHOWN else shown)
    ]
    echo(table(rows))
    costs = ", ".join(f"{name} {cost:.3g}" for name, cost in zip(study.stages, study.item_costs, strict=True))
    echo(f"{study.requests:,} requests of {args.split}, {study.items:,} items; us per item: {costs}")
    run = Path(args.checkpoint).resolve().parent
    folder = Path(args.out) if args.out else (run.parent if run.name == "checkpoints" else run) / "quotas"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "quotas.json", json.dumps(asdict(study), indent=1) + "\n")
    points = [(point.cost, point.recall, " -> ".join(map(str, point.quotas)), point.on_front) for point in study.points]
    now = next((number for number, point in enumerate(study.points) if point.quotas == study.current), None)
    title = f"Quotas of {' -> '.join(study.stages)}"
    figure = front(points, now, "time per request on this machine (µs)", recall, title)
    write_whole(folder / "quotas.svg", svg(figure))
    write_whole(folder / "quotas.png", png(figure))
    echo(f"{len(study.points)} choices of quotas: {folder}/quotas.json, quotas.svg, quotas.png")
    return 0


def _stage_quotas(text: str) -> tuple[str, list[int]]:
    name, equals, numbers = text.partition("=")
    parts = [part.strip() for part in numbers.split(",")]
    if not equals or not all(part.isdigit() for part in parts):
        raise ValueError(f"--grid takes a stage and its quotas, e.g. retrieval=50,100,200, got {text!r}")
    return name, [int(part) for part in parts]
