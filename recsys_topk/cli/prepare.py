"""Read a data set once into the Arrow cache; `fit` does the same by itself.

With --data NAME, the options are those of `fit --data NAME`. Without, it is RecFlow: days already there are skipped, so
an interrupted run is resumed.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from recsys_topk.cli.console import echo, make_parser


def main(argv: list[str]) -> int:
    """Prepare with a progress bar over the bytes of the source, and an estimate of the size from what is done."""
    if any(text.partition("=")[0] == "--data" for text in argv):
        return prepare_any(argv)
    parser = make_parser("prepare", __doc__)
    parser.add_argument(
        "--data.root", dest="root", required=True, help="folder or URL that holds all_stage or data/all_stage"
    )
    parser.add_argument("--data.days", dest="days", help="a date or FIRST:LAST, both included (default: all)")
    parser.add_argument("--data.cache_dir", dest="cache_dir", help="where to put it (default: the user's cache folder)")
    given = parser.parse_args(argv)
    from tqdm import tqdm

    from recsys_topk.datamodules import cache_home
    from recsys_topk.datamodules.locations import version_of
    from recsys_topk.datamodules.recflow import DayCache, RecFlowFiles, select_days

    files = RecFlowFiles(given.root)
    days = select_days(files.days, given.days, files.days, "--data.days")
    cache = DayCache(files, given.cache_dir or cache_home() / "prepared")
    source = {day: sum(version_of(path)[0] for path in files.paths(day).values()) for day in days}
    missing = cache.missing(days)
    there, size = len(days) - len(missing), tqdm.format_sizeof
    echo(f"{len(days)} days, {size(sum(source.values()), 'B')} of source; {there} already in {cache.folder}")
    total, written = sum(source[day] for day in missing), 0
    with tqdm(total=total, unit="B", unit_scale=True, desc="prepare") as bar:

        def done(day: str, folder: Path) -> None:
            nonlocal written
            written += sum(path.stat().st_size for path in folder.iterdir())
            bar.update(source[day])
            bar.set_postfix_str(f"{day}, about {size(written / bar.n * total, 'B')} in all")

        cache.prepare(missing, progress=done)
    if missing:
        seconds = bar.format_dict["elapsed"]
        echo(f"{len(missing)} days, {size(written, 'B')} written in {seconds:.1f} s: {cache.folder}")
    return 0


def prepare_any(argv: list[str]) -> int:
    """Prepare the data of any data module, with its options as `fit` takes them."""
    from recsys_topk.cli.arguments import parse_options
    from recsys_topk.datamodules.base import CascadeDataModule
    from recsys_topk.runs.run import TrainingRun
    from recsys_topk.spec import build

    config = parse_options(argv)
    other = sorted(set(config) - {"data", "trust", "config"})
    if other:
        raise ValueError(f"prepare takes options of the data (--data NAME --data.OPTION VALUE), got --{other[0]}")
    run = TrainingRun(config)
    data: CascadeDataModule = build(run.options()["data"], base=CascadeDataModule, trust=run.trust)
    start = perf_counter()
    data.prepare_data()
    for line in data.facts():
        echo(line)
    echo(f"prepared in {perf_counter() - start:.1f} s")
    return 0
