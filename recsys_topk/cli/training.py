"""`recsys-topk fit|validate|test|predict`: a typed config, and what the run says."""

from __future__ import annotations

from typing import cast

import yaml

from recsys_topk.cli.arguments import typed
from recsys_topk.cli.console import echo
from recsys_topk.cli.help import class_help, command_help
from recsys_topk.runs.config import DEFAULTS, KEYS, registry_of
from recsys_topk.runs.run import Command, TrainingRun


def main(argv: list[str]) -> int:
    """Run a training command; `argv` starts with its name."""
    command, rest = cast("Command", argv[0]), argv[1:]
    text = wanted_help(command, rest)
    if text is not None:
        echo(text)
        return 0
    shown = [argument for argument in rest if argument.partition("=")[0] == "--print_config"]
    config = typed([argument for argument in rest if argument not in shown])
    resume = config.pop("resume", None)
    if resume is not None and command != "fit":
        raise ValueError(f"--resume goes with fit; {command} takes --ckpt_path FILE")
    run = TrainingRun(config, resume=resume, say=echo)
    if shown:
        echo(yaml.safe_dump(run.options(command), sort_keys=False).rstrip())
    elif run.nothing_left:
        echo(run.nothing_left)
    else:
        getattr(run, command)()
    return 0


def wanted_help(command: Command, rest: list[str]) -> str | None:
    """Return the help that the arguments ask for, if they do."""
    if "-h" in rest or "--help" in rest:
        return command_help(command)
    if "--help_all" in rest:
        from recsys_topk.runs.lightning_cli import CascadeCLI

        data = class_help("data", registry_of("data"), DEFAULTS["data"])
        return f"{CascadeCLI(command, {}, build=False).help()}\n{data}"
    for key in KEYS:
        for position, argument in enumerate(rest):
            option, equals, name = argument.partition("=")
            if option == f"--{key}.help":
                others = rest[:position] + rest[position + 1 :]
                if not equals and others[position : position + 1] and not others[position].startswith("--"):
                    name = others.pop(position)
                return class_help(key, registry_of(key), name or typed(others).get(key))
    return None
