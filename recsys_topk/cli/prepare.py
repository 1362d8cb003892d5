"""`recsys-topk prepare`: read RecFlow's files once into the Arrow cache."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recsys_topk.cli.console import echo, warn

if TYPE_CHECKING:
    from recsys_topk.datamodules.recflow import DayCache


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        prog="recsys-topk prepare",
        description="Read a RecFlow data set once into the Arrow cache. Days already there are skipped, so an "
        "interrupted run is resumed; `fit` does the same by itself for the days it needs.",
    )
    made.add_argument("--data.root", dest="root", required=True, help="folder that holds all_stage or data/all_stage")
    made.add_argument("--data.days", dest="days", help="a date or FIRST:LAST, both included (default: all)")
    made.add_argument("--data.cache_dir", dest="cache_dir", help="where to put it (default: the user's cache folder)")
    return made


def main(argv: list[str]) -> int:
    """Run the command; return 0, or 1 after an error of the user's."""
    given = parser().parse_args(argv)
    from recsys_topk.datamodules import cache_home
    from recsys_topk.datamodules.recflow import DayCache, RecFlowFiles, select_days

    try:
        files = RecFlowFiles(given.root)
        days = select_days(files.days, given.days, files.days, "--data.days")
        cache = DayCache(files, given.cache_dir or cache_home() / "prepared")
        _prepare(cache, days)
    except (OSError, ValueError) as error:
        warn(f"error: {error}")
        return 1
    return 0


def _prepare(cache: DayCache, days: Sequence[str]) -> None:
    """Prepare with a progress bar over the bytes of the source, and an estimate of the size from what is done."""
    from tqdm import tqdm

    source = {day: sum(path.stat().st_size for path in cache.files.paths(day).values()) for day in days}
    missing = cache.missing(days)
    there = len(days) - len(missing)
    echo(f"{len(days)} days, {_size(sum(source.values()))} of source; {there} already in {cache.folder}")
    began, read, written = time.monotonic(), 0, 0
    with tqdm(total=sum(source[day] for day in missing), unit="B", unit_scale=True, desc="prepare") as bar:

        def done(day: str, folder: Path) -> None:
            nonlocal read, written
            read += source[day]
            written += sum(path.stat().st_size for path in folder.iterdir())
            total = written / read * sum(source[day] for day in missing)
            bar.set_postfix_str(f"{day}, about {_size(total)} in all")
            bar.update(source[day])

        cache.prepare(missing, progress=done)
    if missing:
        echo(f"{len(missing)} days, {_size(written)} written in {time.monotonic() - began:.1f} s: {cache.folder}")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"
