"""Atomic file writes: a file appears complete or not at all."""

from __future__ import annotations

import csv
import errno
import io
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` when the block ends, and removed if the block raises.

    Args:
        path: The file; its folder is created if it is missing.
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
    """Write a file atomically: a reader sees either the old file or all of `content`.

    Args:
        path: The file; its folder is created if it is missing.
        content: Text (written as UTF-8) or bytes.
    """
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, head: bool = True) -> str:
    """Return rows as CSV.

    Args:
        rows: Values by column; a row may omit columns.
        columns: The columns; None = every key that any row has.
        head: Whether to write a header line.

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
