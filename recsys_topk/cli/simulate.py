"""Simulate a multi-stage recommender and write what it did in RecFlow's layout.

The ground truth is beside it (ground_truth.npz).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recsys_topk.cli.console import echo, make_parser
from recsys_topk.datamodules.simulator.world import PRESETS, WorldConfig
from recsys_topk.text import table

OPTIONS = {
    "users": "users",
    "items": "items over all days, the catalogue",
    "days": "days",
    "requests": "requests per day",
    "seed": "the same seed gives the same files",
    "start": "first day, YYYY-MM-DD",
    "retrieved": "items that retrieval passes on",
    "searched": "items that a strong retrieval searches",
    "retrieval-noise": "noise of a strong retrieval; none = a weak retrieval, by categories and popularity",
    "author-quality": "share of an item's appeal that is its author's",
    "drift": "angle in radians by which taste rotates per day",
    "new-items": "items uploaded per day; none = a quarter of all items over all days",
    "noise": "noise of the best stage",
}
NUMBERS = {"retrieval-noise": float, "new-items": int}
LARGE_DAY = "large-day"  # random lists of one day as large as RecFlow's; takes --requests, --users and --seed


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser("simulate", __doc__)
    parser.add_argument("--out", required=True, help="folder to create; it must not exist")
    parser.add_argument("--preset", choices=[*PRESETS, LARGE_DAY], help="a named world; further options change it")
    for name, text in OPTIONS.items():
        default = getattr(WorldConfig(), name.replace("-", "_"))
        kind = _or_none(NUMBERS[name]) if name in NUMBERS else type(default)
        shown = "none" if default is None else default
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"{text} (default: {shown})")
    parser.add_argument(
        "--recalls",
        action="store_true",
        help="print the recalls of random order, popularity and the true utility on the last day",
    )
    parser.add_argument(
        "--describe",
        action="store_true",
        help="print what makes the world hard: AUC of each logged group, oracles, sizes beside those of RecFlow",
    )
    given = vars(parser.parse_args(argv))
    out, recalls, describe, preset = (given.pop(name) for name in ("out", "recalls", "describe", "preset"))
    from tqdm import tqdm

    from recsys_topk.datamodules import RecFlowDataModule, reference_recalls, simulate

    if preset == LARGE_DAY:
        return _large_day(out, given, recalls or describe)
    config = replace(PRESETS[preset] if preset else WorldConfig(), **given)
    if (recalls or describe) and config.days < 3:
        option = "--recalls" if recalls else "--describe"
        raise ValueError(f"{option} needs days to train, validate and test on, at least 3; got {config.days}")
    with tqdm(total=config.days, unit="day", desc="simulate") as bar:

        def done(day: str) -> None:
            bar.set_postfix_str(day)
            bar.update()

        root = simulate(out, config, progress=done)
    echo(f"{root}: {config.days} days, {config.days * config.requests} requests in {bar.format_dict['elapsed']:.1f} s")
    if recalls or describe:
        data = RecFlowDataModule(root=str(root))
        data.prepare_data()
    if recalls:
        echo(table([{"ranker": ranker, **values} for ranker, values in reference_recalls(data).items()]))
    if describe:
        from recsys_topk.datamodules.simulator.description import describe_world

        for title, rows in describe_world(data):
            echo(f"{title}\n{table(rows)}\n")
    echo(f"train on it: recsys-topk fit --data.root {root}")
    return 0


def _large_day(out: str, given: dict[str, Any], more: bool) -> int:
    from recsys_topk.datamodules.simulator.large_day import LargeDay, simulate_large_day

    if more or not given.keys() <= {"requests", "users", "seed"}:
        raise ValueError(f"--preset {LARGE_DAY} takes --requests, --users and --seed only; leave the others out")
    config = LargeDay(**given)
    root = simulate_large_day(out, config)
    days = " ".join(f"--data.{split}_days {config.day}" for split in ("train", "val", "test"))
    echo(f"{root}: {config.requests} requests of {config.day}")
    echo(f"train on it: recsys-topk fit --data.root {root} {days} --model.embedding_optimizer rowwise_adagrad")
    return 0


def _or_none(kind: type[int | float]) -> Callable[[str], float | None]:
    def convert(text: str) -> float | None:
        return None if text == "none" else kind(text)

    convert.__name__ = f"{kind.__name__} or none"  # for the message of argparse
    return convert
