"""Run a command with writes that fail: ``python -m tests.tools.faulty KIND N FOLDER COMMAND ...``.

KIND is ``enospc`` or ``erofs``: the N-th write of Python to a file below FOLDER, and every one after it, raises that
error. With ``size``, the kernel refuses every file to grow beyond N bytes (RLIMIT_FSIZE), for all libraries.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Self

ERRORS = {"enospc": errno.ENOSPC, "erofs": errno.EROFS}


class Faulty:
    """A file whose writes are counted with those of all others; it behaves like the file otherwise."""

    number, failing = 0, 0

    def __init__(self, file: Any, error: int) -> None:
        self._file, self._error = file, error

    def write(self, content: Any) -> Any:
        Faulty.number += 1
        if Faulty.number >= Faulty.failing:
            raise OSError(self._error, os.strerror(self._error), str(self._file.name))
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *caught: object) -> Any:
        return self._file.__exit__(*caught)

    def __iter__(self) -> Any:
        return iter(self._file)


def install(kind: str, number: int, folder: Path) -> None:
    """Make the writes of this process fail."""
    if kind == "size":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then raises EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
        return
    Faulty.failing, original = number, io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        made = original(file, mode, *args, **kwargs)
        inside = isinstance(file, (str, os.PathLike)) and Path(os.fspath(file)).resolve().is_relative_to(folder)
        return Faulty(made, ERRORS[kind]) if inside and set(mode) & set("wxa+") else made

    io.open = builtins.open = opened  # type: ignore[assignment]


def main() -> int:
    kind, number, folder, *command = sys.argv[1:]
    install(kind, int(number), Path(folder).resolve())
    from recsys_topk.cli.main import main as run

    return run(command)


if __name__ == "__main__":
    sys.exit(main())
