"""The entry point: a static table of commands, so that help needs no import of torch."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from recsys_topk import __version__
from recsys_topk.cli.console import echo, warn
from recsys_topk.files import FULL, cache_home, disk_error
from recsys_topk.registry import suggest
from recsys_topk.text import printable

# name -> (module with `main(argv) -> int | None`, description). The module is imported when the command is run.
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("recsys_topk.cli.training", "train a cascade"),
    "validate": ("recsys_topk.cli.training", "measure a checkpoint on the validation day"),
    "test": ("recsys_topk.cli.training", "measure a checkpoint on the test day"),
    "predict": ("recsys_topk.cli.training", "write scores, rank and dropping stage of every candidate as Parquet"),
    "demo": ("recsys_topk.cli.demo", "simulate a small world, train and test a cascade on it"),
    "init": ("recsys_topk.cli.init", "write a config with comments, for your data, to edit"),
    "simulate": ("recsys_topk.cli.simulate", "write a simulated world in the RecFlow layout"),
    "schema": ("recsys_topk.cli.schema", "guess the roles and types of the columns of your tables, as YAML to edit"),
    "prepare": ("recsys_topk.cli.prepare", "read a data set once into a memory-mapped Arrow cache"),
    "export": ("recsys_topk.cli.export", "write each stage of a checkpoint as ONNX, with the catalogue"),
    "quotas": ("recsys_topk.cli.quotas", "measure joint recall and cost as a function of the quotas"),
    "similar": ("recsys_topk.cli.similar", "list the nearest items of an item"),
    "index": ("recsys_topk.cli.index", "index the catalogue of an export (no torch needed)"),
    "recommend": ("recsys_topk.cli.recommend", "recommend items of an export to users (no torch needed)"),
    "serve": ("recsys_topk.cli.serve", "serve recommendations of an export over HTTP (no torch needed)"),
    "bench": ("recsys_topk.cli.bench", "time operators, losses, data and training steps"),
    "fuzz": ("recsys_topk.cli.fuzz", "test losses and operators with random lists"),
    "plan": ("recsys_topk.cli.plan", "plan the sharding of tables over devices, and check that they fit"),
    "compare": ("recsys_topk.cli.compare", "train several losses on the same data, with a paired test"),
    "tune": ("recsys_topk.cli.compare", "tune options on the validation days, for one config or several losses"),
    "stream": ("recsys_topk.cli.compare", "test on each day, then train on it, for several losses"),
    "online": ("recsys_topk.cli.online", "train on new days as they arrive, and publish exports that pass a gate"),
    "rollback": ("recsys_topk.cli.online", "serve the export that `online` published before"),
    "experiment": ("recsys_topk.cli.experiment", "run the paper's experiments, simulated or on RecFlow"),
    "report": ("recsys_topk.cli.report", "write one HTML page of runs, with the figures of the paper"),
    "sweep": ("recsys_topk.cli.sweep", "list the W&B sweeps, or print one for `wandb sweep`"),
    "dashboard": ("recsys_topk.cli.dashboard", "build the W&B workspace that shows the runs"),
    "losses": ("recsys_topk.cli.losses", "list the losses and operators"),
    "doctor": ("recsys_topk.cli.doctor", "check the installation and print how to fix it"),
    "completion": ("recsys_topk.cli.completion", "print the completion of commands and options for your shell"),
}

EXAMPLES = """examples:
  recsys-topk fit --loss dftopk --loss.tau 1 --trainer.max_epochs 1
  recsys-topk fit --loss listnet --data.root path/to/recflow --trainer.accelerator gpu
  recsys-topk test --ckpt_path runs/dftopk-tau1-neg0-s42/checkpoints/last.ckpt
  recsys-topk COMMAND --help

exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted
RECSYS_TOPK_DEBUG=1 in the environment shows the traceback of an error"""


def usage() -> str:
    """Return the help text."""
    width = max(len(name) for name in COMMANDS)
    columns, indent = max(width + 24, shutil.get_terminal_size((120, 0)).columns), " " * (width + 4)
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    lines = [textwrap.fill(line, columns, subsequent_indent=indent) for line in lines]
    head = ["usage: recsys-topk [--help] [--version] COMMAND ...", ""]
    purpose = ["Train recommender cascades so that the right set of items survives.", ""]
    return "\n".join([*head, *purpose, "commands:", *lines, "", EXAMPLES])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status (0 = done, 1 = failed, 2 = wrong input)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        echo(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        echo(f"recsys-topk {__version__}")
        return 0
    command = arguments[0]
    if os.environ.get("MPLBACKEND", "").startswith("module://"):  # of a notebook; no command shows a window
        del os.environ["MPLBACKEND"]
    if command not in COMMANDS:
        close = suggest(command, COMMANDS)
        warn(f"recsys-topk: unknown command {command!r}; {close}commands: {', '.join(COMMANDS)}")
        return 2
    module_name = COMMANDS[command][0]
    notices = logging.getLogger("lightning.pytorch")
    before = notices.handlers[:], logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_printable_record)
    warnings.formatwarning = _printable_warning
    try:
        module = importlib.import_module(module_name)
        shared = module_name.endswith((".training", ".compare", ".online"))  # modules with several commands
        return int(module.main(arguments if shared else arguments[1:]) or 0)
    except KeyboardInterrupt:
        warn(f"recsys-topk {command}: interrupted")
        return 130
    except BrokenPipeError:  # of what is printed without `echo`, such as help
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        disk = None if isinstance(error, ValueError) else disk_error(error)
        expected = isinstance(error, (ValueError, OSError, ImportError)) or hasattr(error, "exit_status")
        known = disk is not None or expected
        if os.environ.get("RECSYS_TOPK_DEBUG") or not known:
            raise
        if not getattr(error, "quiet", False):  # quiet: another process of the same run prints it
            warn(f"recsys-topk {command}: {describe(error) if disk is None else describe_disk(disk, arguments)}")
        return int(getattr(error, "exit_status", 1 if disk is not None and disk.errno in FULL else 2))
    finally:  # for programs that call this function
        notices.handlers[:], factory, warnings.formatwarning = before
        logging.setLogRecordFactory(factory)


def describe_disk(error: OSError, arguments: Sequence[str]) -> str:
    """Return an error of the disk or of a limit as one line that names the option to change.

    Example:
        >>> describe_disk(OSError(28, "No space left on device", "runs/a/checkpoints/last.ckpt"), [])
        'No space left on device: runs/a/checkpoints/last.ckpt; free some, or name another folder: --out FOLDER'
    """
    path = str(error.filename or "")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "allow more (ulimit -n 4096), or use fewer: --data.num_workers 0, --jobs 1"
    else:
        words = [part for argument in arguments for part in argument.split("=", 1)]
        typed = [(value, f"{name} FOLDER") for name, value in pairwise(words) if name in ("--out", "--data.cache_dir")]
        cache = "--data.cache_dir FOLDER or RECSYS_TOPK_CACHE=FOLDER"
        known = [*typed, (str(cache_home()), cache), ("runs", "--out FOLDER"), (tempfile.gettempdir(), "TMPDIR=FOLDER")]
        inside = (Path(path).absolute().is_relative_to(Path(folder).absolute()) for folder, _ in known)
        options = [*(option for (_, option), yes in zip(known, inside, strict=True) if yes), "--out FOLDER"]
        advice = f"{'free some, or ' if error.errno in FULL else ''}name another folder: {options[0]}"
    return f"{error.strerror}: {path or 'where is not known'}; {advice}"


def describe(error: BaseException) -> str:
    """Return an error as one line, with the remedy if an optional dependency is missing."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    if isinstance(error, ImportError) and not str(error.name or "").startswith("recsys_topk"):
        return f"{text}; run `recsys-topk doctor` to see what is missing and how to install it"
    return text


_format_warning = warnings.formatwarning


def _printable_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Return a log record without control characters, such as those in names of columns and items."""
    record = logging.LogRecord(*args, **kwargs)
    record.msg, record.args = printable(record.getMessage(), lines=True), None
    return record


def _printable_warning(message: Warning | str, *args: Any, **kwargs: Any) -> str:
    return printable(_format_warning(message, *args, **kwargs), lines=True)
