"""Atomic writes: a file or a folder appears complete or not at all. Also the cache folder of the package."""

from __future__ import annotations

import csv
import errno
import io
import os
import secrets
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` when the block ends, and removed if the block raises.

    The folder of the file is created if it is missing.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees either the old file or all of `content`. Text is written as UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, head: bool = True) -> str:
    """Return rows, values by column, as CSV. A row may omit columns; by default every key of any row is a column.

    Example:
        >>> csv_text([{"run": "dftopk", "recall": 0.5}, {"run": "listnet"}]).split()
        ['run,recall', 'dftopk,0.5', 'listnet,']
    """
    text = io.StringIO()
    names = columns or list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def cache_home() -> Path:
    """Return the cache folder: $RECSYS_TOPK_CACHE if it is set, else recsys_topk in the user's cache folder."""
    chosen = os.environ.get("RECSYS_TOPK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user).expanduser() if user else Path.home() / ".cache") / "recsys_topk"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` if the block succeeds.

    If the block raises, the temporary folder is removed. If another process has created `target` in the meantime, that
    folder is kept and the temporary one is removed. A killed process leaves a hidden temporary folder behind;
    `remove_partial` removes it.

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
    """Create a folder if it does not exist; return whether it was created.

    `write` writes the content into the folder it is given. The folder appears only when it is complete, also if the
    process fails or is killed. A second process waits for the first. With `resume`, files of an interrupted or killed
    process are kept for the next one; they are removed if `write` raises an error.
    """
    from filelock import FileLock

    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / ".lock"):
        if target.is_dir():
            return False
        remove_partial(target)
        if not resume:
            with whole_folder(target) as folder:
                write(folder)
            return True
        folder = target.parent / f".{target.name}.partial"
        folder.mkdir(exist_ok=True)
        try:
            write(folder)
        except Exception:  # not an interruption: after the error is mended the folder may have another name
            shutil.rmtree(folder, ignore_errors=True)
            raise
        folder.rename(target)
    return True


def remove_partial(target: Path) -> None:
    """Remove the temporary folders of killed writers of `target`. The caller must hold the lock of the folder."""
    for folder in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(folder, ignore_errors=True)
