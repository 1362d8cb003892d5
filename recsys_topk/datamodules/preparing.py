"""What preparing any source of data shares: made once, whole or not at all, with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from recsys_topk.datamodules.folders import remove_partial, whole_folder

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Told what is being done, how much more of it is done, and how much there is in all, if known."""


def make_once(target: Path, write: Callable[[Path], None]) -> bool:
    """Make a folder if it is not there; return whether it was made.

    It appears by a rename when it is whole. A process that fails or is killed leaves nothing that counts, and a second
    process waits for the first.

    Args:
        target: The folder.
        write: Writes its content into an empty folder.
    """
    from filelock import FileLock

    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if target.is_dir():
            return False
        remove_partial(target)
        with whole_folder(target) as folder:
            write(folder)
    return True


@contextmanager
def progress_bars(progress: Progress | None = None) -> Iterator[Progress]:
    """Give what preparing tells its progress: `progress` if there is one, else a bar per step on a terminal."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda what, done, total: None)
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def tell(what: str, done: int, total: int | None) -> None:
        if what not in bars:
            for bar in bars.values():
                bar.close()
            bars[what] = tqdm(total=total, desc=what, unit="rows", unit_scale=True)
        bars[what].update(done)

    try:
        yield tell
    finally:
        for bar in bars.values():
            bar.close()
