"""What the commands share: the parser of their options, and what they write for people."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a `ValueError` of one line, as all mistakes of a command are."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and ending the process."""
        raise ValueError(f"{message}; see {self.prog} --help")


def make_parser(command: str, description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """Return the parser of a command; its options cannot be shortened, because further ones may go to `fit`.

    Args:
        command: The command.
        description: What it does: the docstring of its module.
        settings: Other arguments of the parser.
    """
    return CommandParser(f"recsys-topk {command}", description=description, allow_abbrev=False, **settings)


def announce_start(command: str) -> None:
    """Write the first line of a command that trains, before torch is imported; only the first process does."""
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
    """Write what `--out FILE` asks for, whole or not at all."""
    from recsys_topk.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(f"--out must be a file that can be written, got {path!r}: {error.strerror}") from error
