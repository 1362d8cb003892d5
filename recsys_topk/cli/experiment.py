"""`recsys-topk experiment NAME`: one of the paper's experiments, or all of them, through the public commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from recsys_topk.cli.console import echo, table
from recsys_topk.experiments.definition import SIZES, Size, available, load
from recsys_topk.experiments.runner import Clock, command_line, is_finished, read_record, run_experiment


def main(argv: list[str]) -> int:
    """Run what is not finished yet of one or all experiments."""
    parser = argparse.ArgumentParser(
        prog="recsys-topk experiment",
        description="Run the paper's experiments: on a simulated world, or, with --data.root, on RecFlow. Each is a "
        "few `recsys-topk compare`, `stream` or `bench` commands, which are printed. What is finished is kept, so an "
        "interrupted command goes on where it was. Further options go to every `recsys-topk fit`.",
        epilog="`recsys-topk experiment list` says what there is; `recsys-topk report runs/paper` makes a page of it.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(available())}, all or list")
    parser.add_argument("--size", choices=SIZES, help="small: simulated, minutes; full: as in the paper, with RecFlow")
    parser.add_argument("--data.root", dest="root", metavar="PATH", help="folder of RecFlow; the size is then full")
    parser.add_argument("--seeds", type=int, help="runs of each competitor; the experiment's own number by default")
    parser.add_argument("--jobs", type=int, default=1, help="training runs at a time (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="competitors to run, with commas between them")
    parser.add_argument("--out", help="folder of all experiments (default: runs/paper, with size full runs/paper-full)")
    options, further = parser.parse_known_args(argv)
    if options.name == "list":
        echo(table([{"experiment": name, "question": load(name).question} for name in available()]))
        return 0
    names = available() if options.name == "all" else [options.name]
    experiments = [load(name) for name in names]
    for name in ("seeds", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    size: Size = options.size or ("full" if options.root else "small")
    if size == "full" and not options.root and names != ["runtime"]:
        raise ValueError("--size full is the paper's RecFlow: give its folder with --data.root, or take --size small")
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    known = {name for experiment in experiments for name in experiment.competitors(size)}
    for name in only:
        if name not in known:
            raise ValueError(f"--only {name!r}: no such competitor here; there are {', '.join(sorted(known))}")
    if options.root:
        further = ["--data.root", options.root, *further]
    folder = Path(options.out or ("runs/paper" if size == "small" else "runs/paper-full"))
    planned = [(experiment, experiment.steps(size, options.seeds, only)) for experiment in experiments]
    plans = [(experiment, steps) for experiment, steps in planned if steps]
    total = 0.0
    for experiment, steps in plans:
        record = read_record(folder / experiment.name)
        for step in steps:
            command = command_line(step, folder / experiment.name, options.jobs, further)
            total += 0 if is_finished(record, command, folder / experiment.name, step) else step.weight
    clock = Clock(total)
    for number, (experiment, steps) in enumerate(plans, start=1):
        echo(f"== {experiment.name} ({number} of {len(plans)}): {experiment.question}")
        run_experiment(experiment, size, steps, folder / experiment.name, options.jobs, further, clock, echo)
    echo(f"make a page of it: recsys-topk report {folder}")
    return 0
