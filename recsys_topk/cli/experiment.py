"""Run the paper's experiments: on a simulated world, or, with --data.root, on RecFlow.

Each is a few comparisons, streams or benchmarks, printed as the commands that do the same. Finished runs are kept: the
same command resumes after an interruption. Further options go to every `recsys-topk fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import echo, make_parser
from recsys_topk.experiments.definition import SIZES, Size, load
from recsys_topk.experiments.runner import ExperimentRun
from recsys_topk.reports.paper import EXPERIMENTS
from recsys_topk.text import table


def main(argv: list[str]) -> None:
    """Run what is not finished yet of one or all experiments."""
    parser = make_parser(
        "experiment",
        __doc__,
        epilog="`recsys-topk experiment list` says what there is; `recsys-topk report runs/paper` makes a page of it.",
    )
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(EXPERIMENTS)}, all or list")
    parser.add_argument("--size", choices=SIZES, help="small: simulated, minutes; full: as in the paper, with RecFlow")
    parser.add_argument("--data.root", dest="root", metavar="PATH", help="folder of RecFlow; the size is then full")
    parser.add_argument("--seeds", type=int, help="runs of each competitor; the experiment's own number by default")
    parser.add_argument("--jobs", type=int, default=1, help="training runs at a time (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="competitors to run, with commas between them")
    parser.add_argument("--out", help="folder of all experiments (default: runs/paper, with size full runs/paper-full)")
    options, rest = parser.parse_known_args(argv)
    if options.name == "list":
        echo(table([{"experiment": name, "question": load(name).content["question"]} for name in EXPERIMENTS]))
        return
    names = list(EXPERIMENTS) if options.name == "all" else [options.name]
    experiments = [load(name) for name in names]
    size: Size = options.size or ("full" if options.root else "small")
    if size == "full" and not options.root and names != ["runtime"]:
        raise ValueError("--size full is the paper's RecFlow: give its folder with --data.root, or take --size small")
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    known = {name for experiment in experiments for name in experiment.competitors(size)}
    for name in only:
        if name not in known:
            raise ValueError(f"--only {name!r}: no such competitor here; there are {', '.join(sorted(known))}")
    further = parse_options([*(["--data.root", options.root] if options.root else []), *rest])
    folder = Path(options.out or ("runs/paper" if size == "small" else "runs/paper-full"))
    works = [
        ExperimentRun(experiment, size, steps, folder / experiment.name, options.jobs, further, bench)
        for experiment in experiments
        if (steps := experiment.steps(size, options.seeds, only))
    ]
    for work in works:
        work.check()
    for number, work in enumerate(works, start=1):
        echo(f"== {work.experiment.name} ({number} of {len(works)}): {work.experiment.content['question']}")
        work.run(echo)
    echo(f"make a page of it: recsys-topk report {folder}")


def bench(suite: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Run a benchmark; return its text for people and for a file."""
    from recsys_topk.bench.suites import measure

    result = measure(suite, options)
    return result.text(), result.to_json()
