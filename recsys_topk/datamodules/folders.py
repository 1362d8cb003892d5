"""Folders that appear whole or not at all, and where the package keeps what it makes."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_home() -> Path:
    """Return the folder for what the package makes: RECSYS_TOPK_CACHE, or recsys_topk in the user's cache folder."""
    chosen = os.environ.get("RECSYS_TOPK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user).expanduser() if user else Path.home() / ".cache") / "recsys_topk"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` by one rename if the block succeeds.

    If the block raises, nothing is left behind. If `target` appeared meanwhile, it stays and ours is dropped: whoever
    was first wrote the same. A killed process leaves a hidden folder, which the next one for the same target removes
    when it is the only writer (hold a lock for that).

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "day"
        >>> with whole_folder(target) as folder:
        ...     _ = (folder / "a.txt").write_text("a")
        >>> [path.name for path in target.iterdir()]
        ['a.txt']
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.partial"
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_once(target: Path, write: Callable[[Path], None], *, resume: bool = False) -> bool:
    """Make a folder if it is not there; return whether it was made.

    A process that fails or is killed leaves nothing that counts, and a second process waits for the first.

    Args:
        target: The folder.
        write: Writes its content into a folder: an empty one, or with `resume` what an interrupted process left.
        resume: Keep what was written if the process is interrupted or killed. An error removes it all the same.
    """
    from filelock import FileLock

    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if target.is_dir():
            return False
        if not resume:
            remove_partial(target)
            with whole_folder(target) as folder:
                write(folder)
            return True
        folder = target.parent / f".{target.name}.partial"
        folder.mkdir(exist_ok=True)
        try:
            write(folder)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        folder.rename(target)
    return True


def remove_partial(target: Path) -> None:
    """Remove what killed writers of `target` left; only for a process that holds the lock of the folder."""
    for folder in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(folder, ignore_errors=True)
