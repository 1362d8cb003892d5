"""Run the paper's experiments: on a simulated world, or, with --data.root, on RecFlow.

Each experiment consists of comparisons, streams or benchmarks, and prints the equivalent commands. After an
interruption, the same command resumes. Further options are passed to every `recsys-topk fit`.
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
    """Run the unfinished parts of one or all experiments."""
    parser = make_parser(
        "experiment",
        __doc__,
        epilog="`recsys-topk experiment list` lists them; `recsys-topk report runs/paper` writes a page of them.",
    )
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(EXPERIMENTS)}, all or list")
    parser.add_argument("--size", choices=SIZES, help="small: simulated; full: RecFlow, the protocol of the paper")
    parser.add_argument("--data.root", dest="root", metavar="PATH", help="folder of RecFlow; the size is then full")
    parser.add_argument("--seeds", type=int, help="runs per competitor (default: as the experiment defines)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel training runs (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="competitors to run, separated by commas")
    parser.add_argument("--out", help="folder of all experiments (default: runs/paper, with size full runs/paper-full)")
    options, rest = parser.parse_known_args(argv)
    if options.name == "list":
        echo(table([{"experiment": name, "question": load(name).content["question"]} for name in EXPERIMENTS]))
        return
    names = list(EXPERIMENTS) if options.name == "all" else [options.name]
    experiments = [load(name) for name in names]
    size: Size = options.size or ("full" if options.root else "small")
    if size == "full" and not options.root and names != ["runtime"]:
        raise ValueError("--size full needs RecFlow: give its folder with --data.root, or use --size small")
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
    echo(f"next: recsys-topk report {folder}")


def bench(suite: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Run a benchmark; return its text and its JSON."""
    from recsys_topk.bench.suites import measure

    result = measure(suite, options)
    return result.text(), result.to_json()
