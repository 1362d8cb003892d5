"""`recsys-topk simulate`: write a simulated world in RecFlow's layout."""

from __future__ import annotations

import argparse
import time

from recsys_topk.cli.console import echo, warn
from recsys_topk.datamodules import WorldConfig
from recsys_topk.runs.text import table


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    default = WorldConfig()
    made = argparse.ArgumentParser(
        prog="recsys-topk simulate",
        description="Simulate a multi-stage recommender and write what it did in RecFlow's layout, with the ground "
        "truth beside it (ground_truth.npz).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--out", required=True, default=argparse.SUPPRESS, help="folder to make; it must not exist")
    made.add_argument("--users", type=int, default=default.users, help="users")
    made.add_argument("--items", type=int, default=default.items, help="items over all days")
    made.add_argument("--days", type=int, default=default.days, help="days")
    made.add_argument("--requests", type=int, default=default.requests, help="requests a day")
    made.add_argument("--seed", type=int, default=default.seed, help="the same seed gives the same files")
    made.add_argument("--start", default=default.start, help="first day, YYYY-MM-DD")
    made.add_argument(
        "--recalls",
        action="store_true",
        help="afterwards, print what a random, a popularity and an all-knowing ranker reach on the last day",
    )
    return made


def main(argv: list[str]) -> int:
    """Run the command; return 0, or 1 after an error of the user's."""
    given = vars(parser().parse_args(argv))
    out, recalls = given.pop("out"), given.pop("recalls")
    from tqdm import tqdm

    from recsys_topk.datamodules import simulate

    began = time.monotonic()
    try:
        config = WorldConfig(**given)
        if recalls and config.days < 3:
            raise ValueError(f"--recalls needs days to train, validate and test on, at least 3; got {config.days}")
        with tqdm(total=config.days, unit="day", desc="simulate") as bar:

            def done(day: str) -> None:
                bar.set_postfix_str(day)
                bar.update()

            root = simulate(out, config, progress=done)
    except (OSError, ValueError) as error:
        warn(f"error: {error}")
        return 1
    requests = config.days * config.requests
    echo(f"{root}: {config.days} days, {requests} requests in {time.monotonic() - began:.1f} s")
    if recalls:
        from recsys_topk.datamodules import RecFlowDataModule, reference_recalls

        data = RecFlowDataModule(root=str(root))
        data.prepare_data()
        found = reference_recalls(data)
        echo(table([{"ranker": ranker, **values} for ranker, values in found.items()]))
    echo(f"train on it: recsys-topk fit --data.root {root}")
    return 0
