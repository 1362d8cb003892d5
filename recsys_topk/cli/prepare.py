"""Read a data set once into the Arrow cache; `fit` does the same if needed.

The options are those of `fit`: a config, the data module and its options. Prepared parts are skipped, so that an
interrupted command resumes.
"""

from __future__ import annotations

from time import perf_counter

from recsys_topk.cli.console import echo, make_parser

OPTIONS = {
    "--config FILE|NAME": "a config of `fit`; its options of the data are used",
    "--data NAME": "recflow, interactions, lists, or the class path of your own data module (default: recflow)",
    "--data.root DIR": "RecFlow: folder or URL that holds all_stage or data/all_stage; interactions, lists: the files",
    "--data.days DAYS": "RecFlow: a date or FIRST:LAST, both included (default: all)",
    "--data.cache_dir DIR": "folder of the cache (default: the user's cache folder)",
    "--check DIR": "check files that another program prepared (docs/prepared-format.md); nothing is written",
    "--data.help NAME": "every option of a data module",
    "--trust PACKAGE": "let a config name classes of this package; may be repeated",
}


def main(argv: list[str]) -> int:
    """Prepare the data of any data module, with its options as `fit` takes them and a progress bar."""
    parser = make_parser("prepare", __doc__)
    for option, text in OPTIONS.items():
        name, _, metavar = option.partition(" ")
        parser.add_argument(name, metavar=metavar, help=text)
    if {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    if argv[:1] == ["--check"]:
        return _check(parser.parse_args(argv).check)
    from recsys_topk.cli.arguments import parse_options
    from recsys_topk.cli.training import requested_help
    from recsys_topk.runs.run import TrainingRun

    help_text = requested_help("fit", argv)
    if help_text is not None:
        echo(help_text)
        return 0
    config = parse_options(argv)
    other = sorted(set(config) - {"data", "trust", "config"})
    if other:
        raise ValueError(
            f"prepare takes --config and options of the data (--data NAME --data.root ...), got --{other[0]}"
        )
    run = TrainingRun(config)
    options = run.options()["data"]

    from recsys_topk.datamodules.base import CascadeDataModule
    from recsys_topk.datamodules.prepare.progress import StepBars
    from recsys_topk.spec import build

    data: CascadeDataModule = build(options, base=CascadeDataModule, trust=run.trust)
    start = perf_counter()
    with StepBars(always=True) as bars:
        data.progress = bars
        data.prepare_data()
    for line in data.facts():
        echo(line)
    echo(f"prepared in {perf_counter() - start:.1f} s")
    return 0


def _check(folder: str) -> int:
    """Check a folder of prepared data and print the sizes of its tables."""
    from pathlib import Path

    from recsys_topk.datamodules.prepare.check import check_prepared

    sizes = check_prepared(Path(folder).expanduser())
    echo(", ".join(f"{name}: {rows:,} rows" for name, rows in sizes.items()))
    echo(f"{folder} can be trained on: --data.root {folder}")
    return 0
