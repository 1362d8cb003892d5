"""Short help for the training commands: what people use, on one screen; `--help_all` shows every option."""

from __future__ import annotations

import inspect
from importlib import resources

from recsys_topk.cli.main import COMMANDS
from recsys_topk.registry import Registry


def command_help(command: str) -> str:
    """Return the help of a training command."""
    usage = f"usage: recsys-topk {command} [--config NAME] [--loss NAME] [--option value ...]"
    options = resources.files("recsys_topk.cli").joinpath("training.txt").read_text(encoding="utf-8")
    return f"{usage}\n\n{COMMANDS[command][1].capitalize()}.\n\n{options.rstrip()}"


def class_help(key: str, table: Registry[object], name: str | None) -> str:
    """Return what the class of an option (`--loss`, `--objective`, `--data`) is and takes, or the names there are."""
    if name is None:
        return f"{table.kind}: {', '.join(table.available())}\n--{key}.help NAME tells more of one"
    cls = table.resolve(name)
    parameters = inspect.signature(cls).parameters.values()
    options = [f"  --{key}.{p.name} (default: {p.default})" for p in parameters if p.default is not p.empty]
    return "\n".join([f"--{key} {name}: {cls.__name__}", *options, "", inspect.cleandoc(cls.__doc__ or "")])
