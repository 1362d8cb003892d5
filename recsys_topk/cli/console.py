"""The parser of the commands, and their output."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser that raises a `ValueError` of one line on a mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise; argparse would print the usage and exit."""
        raise ValueError(f"{message}; see {self.prog} --help")


def make_parser(command: str, description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """Return the parser of a command. Options cannot be abbreviated, because unknown ones may be passed to `fit`."""
    return CommandParser(f"recsys-topk {command}", description=description, allow_abbrev=False, **settings)


def announce_start(command: str) -> None:
    """Write the first line of a training command, in the first process only, before torch is imported."""
    from recsys_topk import __version__
    from recsys_topk.runs.directory import first_process

    if first_process():
        echo(f"recsys-topk {__version__} {command}: loading torch, a few seconds")


def echo(text: str = "") -> None:
    """Write one line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def write_to(path: str, text: str) -> None:
    """Write the file of `--out FILE` atomically."""
    from recsys_topk.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(f"--out must be a file that can be written, got {path!r}: {error.strerror}") from error
