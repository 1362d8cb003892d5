"""Typed options as a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recsys_topk.runs.config import set_option

REPEATED = ("config", "trust")
FLAGS = ("corpus",)  # options whose value may be omitted


def parse_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return typed options as a config. Values remain text; they get their types when the config is parsed.

    Example:
        >>> parse_options(["--loss.tau", "2", "--loss=dftopk", "--config", "simulated"])
        {'loss': {'class_path': 'dftopk', 'init_args': {'tau': '2'}}, 'config': ['simulated']}
        >>> parse_options(["--trainer.callbacks+=my.Callback", "--trainer.callbacks.every", "3"])
        {'trainer': {'callbacks+': [{'class_path': 'my.Callback', 'init_args': {'every': '3'}}]}}
        >>> parse_options(["--corpus", "--corpus.k=5"])
        {'corpus': {'class_path': 'true', 'init_args': {'k': '5'}}}
    """
    config: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option != "-c" and not option.startswith("--"):
            raise ValueError(f"{option!r} is not an option; options are given as --NAME VALUE or --NAME=VALUE")
        if not equals:
            if option[2:] in FLAGS and rest[:1] not in (["true"], ["false"]):
                rest.insert(0, "true")
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{option} needs a value; see --help")
            value = rest.pop(0)
        name = "config" if option == "-c" else option[2:]
        if name in REPEATED:
            config.setdefault(name, []).append(value)
        else:
            set_option(config, name, value)
    return config
