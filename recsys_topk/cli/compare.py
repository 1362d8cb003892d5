"""Train several losses on the same data and batch order, with several seeds.

compare trains and tests each loss, with standard deviation and a paired test. With --tune N, it first tunes each loss
with N trials on the validation days, and tests the best options once. tune does only the tuning, of several losses or
of one config. stream takes the days in order: it tests on each day with the model trained before it, then trains on the
day (--trainer.max_epochs passes). The first day is only for training. Optimizer and schedule continue from day to day.
After an interruption, the same command resumes; a stream also continues when new days are available. Further options
are passed to every `recsys-topk fit`.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from pathlib import Path
from typing import Any

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import announce_start, echo, make_parser
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.run import TrainingRun
from recsys_topk.runs.trials import Competition, by_name
from recsys_topk.trust.typed import import_from_here, trusted_by


def main(argv: list[str]) -> None:
    """Run the unfinished runs, then print and write the table and the plots; `argv` starts with the command."""
    command, *rest = argv
    options, further = make_command_parser(command).parse_known_args(rest)
    trials = getattr(options, "trials", 0)
    if not trials and getattr(options, "space", None):
        raise ValueError("--space needs --tune N, the number of trials per competitor")
    announce_start(command)
    competition = read_competition(options, further, command)
    facts = provenance(["recsys-topk", *argv])
    if not trials:
        getattr(importlib.import_module(f"recsys_topk.experiments.{command}"), command)(competition, facts, echo)
        return
    from recsys_topk.experiments.search_space import parse_spaces
    from recsys_topk.experiments.study import Tuning
    from recsys_topk.experiments.tune import tune
    from recsys_topk.experiments.tuned_comparison import compare_tuned

    spaces = parse_spaces(options.space, list(competition.variants))
    tuning = Tuning(spaces, trials, options.metric, options.tuning_seed, options.storage, not options.no_prune)
    (tune if command == "tune" else compare_tuned)(competition, tuning, facts, echo)


def make_command_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of compare, tune or stream."""
    parser = make_parser(command, __doc__)
    parser.add_argument("--losses", default="", help="names of losses or published objectives, separated by commas")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="LABEL=OPTIONS",
        help="a further competitor, e.g. 'dftopk tau 500=--loss dftopk --loss.tau 500'",
    )  # fmt: skip
    if command != "tune":
        seeds = "runs per competitor (default: 3; with --tune: 5)"
        parser.add_argument("--seeds", type=int, help=seeds if command == "compare" else seeds.partition(";")[0] + ")")
    parser.add_argument("--out", default=f"runs/{command}", help="folder of the results (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, each with one thread if more than 1")
    parser.add_argument("--logger", choices=["csv", "wandb"], default="csv", help="wandb: offline without a key")
    if command == "stream":
        return parser
    number: dict[str, Any] = {"dest": "trials", "type": int, "metavar": "N"}
    if command == "tune":
        parser.add_argument("--trials", **number, default=8, help="trials per competitor (default: %(default)s)")
    else:
        parser.add_argument("--tune", **number, default=0, help="tune each competitor with N trials before the test")
    parser.add_argument(
        "--space", action="append", default=[], metavar="SPACE",
        help="OPTION=log(1e-4,1e-2), float(0,1), int(1,5), logint(8,512) or choice(a,b); LABEL:OPTION=... for one "
        "competitor; or a YAML file; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--metric", metavar="NAME/corpus",
        help="tune a metric over the whole catalogue, e.g. recall@20/corpus (default: the monitored validation metric)",
    )  # fmt: skip
    parser.add_argument("--storage", metavar="URL", help="database of Optuna (default: SQLite in --out)")
    parser.add_argument("--tuning-seed", type=int, default=0, help="seed of the trials (default: %(default)s)")
    parser.add_argument("--no-prune", action="store_true", help="train every trial to its end")
    return parser


def read_competition(options: argparse.Namespace, further: list[str], command: str) -> Competition:
    """Return the competitors, seeds and folders of a command; `further` are options of every `recsys-topk fit`."""
    variants = dict(by_name([name for name in options.losses.split(",") if name]))
    for text in options.variant:
        label, equals, chosen = text.partition("=")
        if not equals or not label or not chosen.lstrip().startswith("--"):
            raise ValueError(f"--variant must be LABEL=OPTIONS, with no = in the label, got {text!r}")
        if label in variants:
            raise ValueError(f"two competitors are called {label!r}; give one of them another label")
        variants[label] = parse_options(shlex.split(chosen))
    if command == "tune" and not variants:
        variants["config"] = {}
    common = parse_options(further)
    import_from_here(name for config in (common, *variants.values()) for name in trusted_by(config))
    for number, variant in enumerate(variants.values()):
        if number == 0 or set(variant) - {"loss", "objective"}:  # names of losses are checked later
            TrainingRun({"config": [common, variant]}).options("fit")
    seeds = getattr(options, "seeds", 1)
    seeds = (5 if getattr(options, "trials", 0) else 3) if seeds is None else seeds
    return Competition(variants, common, seeds, Path(options.out), options.jobs, options.logger)
