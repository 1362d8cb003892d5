"""What the commands write for people: lines on standard output, one-line errors on standard error."""

from __future__ import annotations

import sys


def echo(text: str = "") -> None:
    """Write one line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def write_to(path: str, text: str) -> None:
    """Write what `--out FILE` asks for, whole or not at all."""
    from recsys_topk.runs.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(f"--out must be a file that can be written, got {path!r}: {error.strerror}") from error
