"""Short help for the training commands: what people use, on one screen; `--help_all` shows every option."""

from __future__ import annotations

import inspect
from importlib import resources

from recsys_topk.registry import Registry

PURPOSE = {
    "fit": "Train a cascade. With no --data.root a small world is simulated once and kept.",
    "validate": "Measure a checkpoint on the validation day; its options are restored, what is typed overrides them.",
    "test": "Measure a checkpoint on the test day; its options are restored, what is typed overrides them.",
    "predict": "Write every candidate's scores, fate and rank as Parquet, for the test days.",
}


def command_help(command: str) -> str:
    """Return the help of a training command."""
    usage = f"usage: recsys-topk {command} [--config NAME] [--loss NAME] [--option value ...]"
    options = resources.files("recsys_topk.cli").joinpath("training.txt").read_text(encoding="utf-8")
    return f"{usage}\n\n{PURPOSE[command]}\n\n{options.rstrip()}"


def class_help(table: Registry[object], name: str | None) -> str:
    """Return what a loss or objective is and takes, or the names there are."""
    if name is None:
        return f"{table.kind}: {', '.join(table.available())}\n--{table.kind}.help NAME tells more of one"
    cls = table.resolve(name)
    parameters = inspect.signature(cls).parameters.values()
    options = ", ".join(f"{p.name}={p.default!r}" for p in parameters if p.default is not inspect.Parameter.empty)
    return f"{cls.__name__}({options})\n\n{inspect.cleandoc(cls.__doc__ or '')}"
