"""The parser of the commands, and their output."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from recsys_topk.text import printable


class CommandParser(argparse.ArgumentParser):
    """A parser that raises a `ValueError` of one line on a mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise; argparse would print the usage and exit."""
        raise ValueError(f"{message}; see {self.prog} --help")


def make_parser(command: str, description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """Return the parser of a command. Options cannot be abbreviated, because unknown ones may be passed to `fit`."""
    return CommandParser(f"recsys-topk {command}", description=description, allow_abbrev=False, **settings)


def announce_start(command: str) -> None:
    """Write the first line of a training command, in the first process only, before torch is imported.

    Notices of the data modules, which use Lightning's logger, then go to standard output like all other lines.
    """
    from recsys_topk import __version__
    from recsys_topk.runs.directory import first_process

    if first_process():
        echo(f"recsys-topk {__version__} {command}: loading torch, a few seconds")
    import lightning.pytorch  # noqa: F401  # adds its own handler

    logging.getLogger("lightning.pytorch").handlers[:] = [_Echo()]


class _Echo(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        echo(self.format(record))


def echo(text: str = "") -> None:
    """Write lines to standard output. If it is closed, as by `head`, or cannot be written, go on without it."""
    try:
        sys.stdout.write(printable(text, lines=True) + "\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        warn(f"standard output cannot be written ({error.strerror}); the command goes on without it")


def warn(text: str) -> None:
    """Write lines to standard error."""
    with suppress(OSError):
        sys.stderr.write(printable(text, lines=True) + "\n")
        sys.stderr.flush()


def write_to(path: str, text: str) -> None:
    """Write the file of `--out FILE` atomically."""
    from recsys_topk.files import disk_error, write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        if disk_error(error):
            raise
        raise ValueError(f"--out must be a file that can be written, got {path!r}: {error.strerror}") from error
