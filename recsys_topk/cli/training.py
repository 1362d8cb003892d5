"""`recsys-topk fit|validate|test|predict`: typed options become a `TrainingRun`, or help is printed."""

from __future__ import annotations

import inspect
import re
import textwrap
from importlib import resources
from typing import Final, cast

import yaml

from recsys_topk.cli.arguments import parse_options
from recsys_topk.cli.console import announce_start, echo
from recsys_topk.cli.corpus_options import take_corpus_options
from recsys_topk.cli.main import COMMANDS
from recsys_topk.options import options_of
from recsys_topk.registry import Registry
from recsys_topk.runs.config import DEFAULTS, KEYS, registry_of
from recsys_topk.runs.run import Command, TrainingRun
from recsys_topk.trust.typed import import_from_here


def main(argv: list[str]) -> None:
    """Run a training command; `argv` starts with its name."""
    command, rest = cast("Command", argv[0]), argv[1:]
    text = requested_help(command, rest)
    if text is not None:
        echo(text)
        return
    print_config = [argument for argument in rest if argument.partition("=")[0] == "--print_config"]
    config = parse_options([argument for argument in rest if argument not in print_config])
    corpus = take_corpus_options(command, config)
    resume = config.pop("resume", None)
    if resume is not None and command != "fit":
        raise ValueError(f"--resume goes with fit; {command} takes --ckpt_path FILE")
    if not print_config:
        announce_start(command)
    run = TrainingRun(config, resume=resume, log_line=echo)
    import_from_here(run.trust)
    if print_config:
        echo(yaml.safe_dump(run.options(command), sort_keys=False).rstrip())
    elif run.finished_message:
        echo(run.finished_message)
    else:
        getattr(run, command)(**({} if corpus is None else {"corpus": corpus}))


def requested_help(command: Command, rest: list[str]) -> str | None:
    """Return the help that the arguments request; None if they do not."""
    if "-h" in rest or "--help" in rest:
        return command_help(command)
    if "--help_all" in rest:
        from recsys_topk.runs.parser import make_parser

        data = class_help("data", registry_of("data"), DEFAULTS["data"])
        return f"{make_parser().format_help()}\n{data}"
    for key in KEYS:
        wanted = [argument for argument in rest if argument.partition("=")[0] == f"--{key}.help"]
        if wanted:
            before, after = rest[: rest.index(wanted[0])], rest[rest.index(wanted[0]) + 1 :]
            name = wanted[0].partition("=")[2] or next((text for text in after[:1] if not text.startswith("--")), "")
            return class_help(key, registry_of(key), name or parse_options([*before, *after]).get(key))
    return None


_ARGUMENT: Final = re.compile(r"^    (\w+): ((?:.|\n(?=        |$))*)", re.MULTILINE)


def command_help(command: str) -> str:
    """Return the help of a training command."""
    usage = f"usage: recsys-topk {command} [--config NAME] [--loss NAME] [--option value ...]"
    options = resources.files("recsys_topk.cli").joinpath("training.txt").read_text(encoding="utf-8")
    return f"{usage}\n\n{COMMANDS[command][1].capitalize()}.\n\n{options.rstrip()}"


def class_help(key: str, table: Registry[object], name: str | None) -> str:
    """Return the docstring and the options of a class (`--loss`, `--objective`, `--data`), or the available names."""
    if name is None:
        return f"{table.kind}: {', '.join(table.available())}\n--{key}.help NAME shows the options of one"
    cls = table.resolve(name)
    about = [inspect.cleandoc(home.__doc__ or "") for home in cls.__mro__]
    entries = dict(reversed([entry for text in about for entry in _ARGUMENT.findall(text.partition("\nArgs:\n")[2])]))
    lines = [f"--{key} {name}: {cls.__name__}", "", about[0].partition("\nArgs:\n")[0]]
    for option, parameter in options_of(cls).items():
        if parameter.default is not parameter.empty:
            lines.append(f"  --{key}.{option} (default: {parameter.default})")
            text = " ".join(entries.get(option, "").split())
            lines.append(textwrap.fill(text, 118, initial_indent="      ", subsequent_indent="      "))
    return "\n".join([*lines, "", *about[0].partition("\nExample:\n")[1:]]).rstrip()
