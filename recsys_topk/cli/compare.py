"""Train several losses on the same data and batch order, with several seeds.

compare trains and tests each loss, with standard deviation and a paired test. stream takes the days in order: it tests
on each day with the model trained before it, then trains on the day (--trainer.max_epochs passes). The first day is
only for training. Optimizer and schedule continue from day to day. After an interruption, the same command resumes; a
stream also continues when new days are available. Further options are passed to every `recsys-topk fit`.
"""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import announce_start, echo, make_parser
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.run import TrainingRun
from recsys_topk.runs.trials import Competition, by_name
from recsys_topk.trust.typed import import_from_here, trusted_by


def main(argv: list[str]) -> None:
    """Run the unfinished runs, then print and write the table and the plots; `argv` starts with the command."""
    command, *rest = argv
    competition = read_competition(rest, command)
    run = getattr(importlib.import_module(f"recsys_topk.experiments.{command}"), command)
    run(competition, provenance(["recsys-topk", *argv]), echo)


def read_competition(argv: list[str], command: str) -> Competition:
    """Return the competitors, seeds and folders of a command."""
    parser = make_parser(command, __doc__)
    parser.add_argument("--losses", default="", help="names of losses or published objectives, separated by commas")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL=OPTIONS",
        help="a further competitor, e.g. 'dftopk tau 500=--loss dftopk --loss.tau 500'",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs per competitor (default: %(default)s)")
    parser.add_argument("--out", default=f"runs/{command}", help="folder of the results (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, each with one thread if more than 1")
    parser.add_argument("--logger", choices=["csv", "wandb"], default="csv", help="wandb: offline without a key")
    options, further = parser.parse_known_args(argv)
    announce_start(command)
    variants = dict(by_name([name for name in options.losses.split(",") if name]))
    for text in options.variant:
        label, equals, chosen = text.partition("=")
        if not equals or not label or not chosen.lstrip().startswith("--"):
            raise ValueError(f"--variant must be LABEL=OPTIONS, with no = in the label, got {text!r}")
        if label in variants:
            raise ValueError(f"two competitors are called {label!r}; give one of them another label")
        variants[label] = parse_options(shlex.split(chosen))
    common = parse_options(further)
    import_from_here(name for config in (common, *variants.values()) for name in trusted_by(config))
    for number, variant in enumerate(variants.values()):
        if number == 0 or set(variant) - {"loss", "objective"}:  # names of losses are checked later
            TrainingRun({"config": [common, variant]}).options("fit")
    return Competition(variants, common, options.seeds, Path(options.out), options.jobs, options.logger)
