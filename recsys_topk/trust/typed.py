"""Packages that the user trusts by typing them: those of the classes that a typed config names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recsys_topk.trust.allowed import names_of_typed
from recsys_topk.trust.documents import CONFIG_SUFFIXES, inspect_config, read_yaml
from recsys_topk.trust.lists import TEXT_KEYS
from recsys_topk.trust.own_runs import recall


def trusted_by(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the packages of the classes that a config names, for a config that was typed or written in a program.

    Names inside files are not included. A file in the directory of a run that this user started adds the packages that
    the run trusts.

    Example:
        >>> trusted_by({"loss": "mine.MyLoss", "out": "runs.old", "config": ["a.yaml"], "model": {"k": 3}})
        ('mine',)
    """
    packages: list[str] = []
    files: list[tuple[str, str]] = []

    def walk(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                walk(str(name).rstrip("+").rpartition(".")[2], inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                walk(key, inner)
        elif isinstance(value, str) and key == "trust":
            packages.extend(filter(None, value.split(",")))
        elif isinstance(value, str) and key in ("config", "ckpt_path"):
            packages.extend(recall(value) if _is_file(value) else ())
        elif isinstance(value, str) and _is_file(value) and key not in TEXT_KEYS:
            files.append((key, value))  # the path of a config for one option
        elif isinstance(value, str) and key not in TEXT_KEYS and key != "resume":
            try:
                content = read_yaml(value, "an option")
            except ValueError:
                return
            if isinstance(content, str):
                packages.extend(names_of_typed(content))
            else:
                walk(key, content)

    walk("", config)
    for key, value in files:
        inspect_config({key: value}, f"--{key}", tuple(packages))
    return tuple(dict.fromkeys(packages))


def import_from_here(names: Iterable[str]) -> None:
    """Append the working directory to the import path if a typed package (`trusted_by`) exists only there.

    The directory is appended last, so that it cannot replace an installed package. Names from files do not count.
    """
    for package in {name.partition(".")[0] for name in names}:
        here = Path.cwd()
        local = (here / f"{package}.py").is_file() or (here / package).is_dir()
        if local and str(here) not in sys.path and importlib.util.find_spec(package) is None:
            sys.path.append(str(here))


def _is_file(value: str) -> bool:
    if value.endswith(CONFIG_SUFFIXES):
        return True
    try:
        return "\0" not in value and Path(value).is_file()
    except OSError:  # a name that is too long
        return False
