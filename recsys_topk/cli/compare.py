"""`recsys-topk compare`: several losses on the same data and batches, with seeds, spread and paired significance."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from recsys_topk.cli.arguments import typed
from recsys_topk.cli.console import echo
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.trials import Competition, by_name


def main(argv: list[str]) -> int:
    """Run what has not been run yet, then print and write the table and the plots."""
    competition = read(
        argv, "compare", "Train several losses on the same data and batch order, with seeds, spread and a paired test. "
        "Further options go to every `recsys-topk fit`. Finished runs are kept: an interrupted comparison is resumed."
    )  # fmt: skip
    from recsys_topk.experiments.compare import compare

    compare(competition, provenance(["recsys-topk", "compare", *argv]), echo)
    return 0


def read(argv: list[str], command: str, description: str) -> Competition:
    """Return what a command that trains several competitors was asked for."""
    parser = argparse.ArgumentParser(prog=f"recsys-topk {command}", description=description, allow_abbrev=False)
    parser.add_argument("--losses", default="", help="names of losses or published objectives, with commas between")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL=OPTIONS",
        help="a further competitor, e.g. 'dftopk tau 500=--loss dftopk --loss.tau 500'",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--out", default=f"runs/{command}", help="folder of the results (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread if more than 1")
    parser.add_argument("--logger", choices=["csv", "wandb"], default="csv", help="wandb: offline without a key")
    options, further = parser.parse_known_args(argv)
    variants = dict(by_name([name for name in options.losses.split(",") if name]))
    for text in options.variant:
        label, equals, chosen = text.partition("=")
        if not equals or not label or not chosen.lstrip().startswith("--"):
            raise ValueError(f"--variant must be LABEL=OPTIONS, with no = in the label, got {text!r}")
        if label in variants:
            raise ValueError(f"two competitors are called {label!r}; give one of them another label")
        variants[label] = typed(shlex.split(chosen))
    common = typed(further)
    return Competition(variants, common, options.seeds, Path(options.out), options.jobs, options.logger)
