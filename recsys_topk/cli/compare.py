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
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import announce_start, echo, make_parser
from recsys_topk.registry import suggest
from recsys_topk.runs.config import merge
from recsys_topk.runs.provenance import provenance
from recsys_topk.runs.run import TrainingRun
from recsys_topk.runs.trials import Competition, by_name
from recsys_topk.trust import inspect_names
from recsys_topk.trust.documents import read_yaml
from recsys_topk.trust.typed import import_from_here, trusted_by


def main(argv: list[str]) -> None:
    """Run the unfinished runs, then print and write the table and the plots; `argv` starts with the command."""
    command, *rest = argv
    options, further = make_command_parser(command).parse_known_args(rest)
    trials = getattr(options, "trials", 0)
    if not trials and not options.study and getattr(options, "space", None):
        raise ValueError("--space needs --tune N, the number of trials per competitor")
    announce_start(command)
    study = read_study(options.study) if options.study else {}
    trials = trials or (study.get("tune", 0) if command != "stream" else 0)
    competition = read_competition(options, further, command, study)
    facts = provenance(["recsys-topk", *argv])
    if not trials:
        getattr(importlib.import_module(f"recsys_topk.experiments.{command}"), command)(competition, facts, echo)
        return
    from recsys_topk.experiments.search_space import parse_spaces
    from recsys_topk.experiments.study import Tuning
    from recsys_topk.experiments.tune import tune
    from recsys_topk.experiments.tuned_comparison import compare_tuned

    spaces = parse_spaces([*space_of(study, competition), *options.space], list(competition.variants))
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
    parser.add_argument(
        "--study", metavar="FILE", help="competitors, options, seeds, trials and spaces from a YAML file; packaged: "
        + ", ".join(packaged_studies()),
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="LABELS", help="competitors of the study to run, by commas")
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


def packaged_studies() -> list[str]:
    """Return the names of the packaged studies."""
    folder = resources.files("recsys_topk.experiments").joinpath("studies")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_study(name: str) -> dict[str, Any]:
    """Return a study: a mapping with `variants`, and optionally `common`, `seeds`, `tests`, `tune` and `space`.

    Args:
        name: A YAML file, or the name of a packaged study.
    """
    if Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    elif name in packaged_studies():
        text = resources.files("recsys_topk.experiments").joinpath(f"studies/{name}.yaml").read_text(encoding="utf-8")
    else:
        known = packaged_studies()
        raise FileNotFoundError(
            f"no study {name!r}; {suggest(name, known)}give a YAML file, or one of {', '.join(known)}"
        )
    content = read_yaml(text, f"the study {name}")
    wanted = {"about", "common", "variants", "seeds", "tests", "tune", "space"}
    if not isinstance(content, dict) or not isinstance(content.get("variants"), dict) or set(content) - wanted:
        raise ValueError(f"the study {name} must be a mapping with variants and optionally {', '.join(sorted(wanted))}")
    inspect_names(content, f"the study {name}")
    return content


def space_of(study: Mapping[str, Any], competition: Competition) -> list[Mapping[str, Any]]:
    """Return the space of a study without that of competitors that are left out."""
    space = dict(study.get("space", {}))
    own = {label: one for label, one in space.pop("variants", {}).items() if label in competition.variants}
    return [{**space, "variants": own}] if study else []


def read_competition(
    options: argparse.Namespace, further: list[str], command: str, study: Mapping[str, Any] | None = None
) -> Competition:
    """Return the competitors, seeds and folders of a command; `further` are options of every `recsys-topk fit`.

    The competitors of a study come first.
    """
    study = study or {}
    only = [label.strip() for label in getattr(options, "only", "").split(",") if label.strip()]
    for label in only:
        if label not in study.get("variants", {}):
            known = ", ".join(study.get("variants", {})) or "there is no --study"
            raise ValueError(f"--only {label!r}: no such competitor; {known}")
    variants = {label: dict(one) for label, one in study.get("variants", {}).items() if not only or label in only}
    variants |= by_name([name for name in options.losses.split(",") if name])
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
    common = merge(study.get("common", {}), common)
    import_from_here(name for config in (common, *variants.values()) for name in trusted_by(config))
    for number, variant in enumerate(variants.values()):
        if number == 0 or set(variant) - {"loss", "objective"}:  # names of losses are checked later
            TrainingRun({"config": [common, variant]}).options("fit")
    for test in study.get("tests", {}).values():
        TrainingRun({"config": [common, next(iter(variants.values())), test]}).options("fit")
    seeds = getattr(options, "seeds", 1)
    tuned = getattr(options, "trials", 0) or study.get("tune")
    seeds = study.get("seeds", 5 if tuned else 3) if seeds is None else seeds
    return Competition(variants, common, seeds, Path(options.out), options.jobs, options.logger, study.get("tests", {}))
