"""Untrusted YAML: read within limits, and checked before a parser builds any object from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from recsys_topk.trust.inspection import MAX_DEPTH, MAX_VALUES, Expand, inspect_names
from recsys_topk.trust.source import UntrustedError

MAX_CHARACTERS = 1_000_000
# Maximum length of a plain scalar. YAML tries to parse plain scalars as numbers, which is slow for long ones.
MAX_PLAIN = 4096
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, source: str) -> Any:
    """Return the plain values of a YAML document; `source` names it in messages.

    The time is bounded for every document: its length, its number of values with all aliases expanded (`a: &a [...]`,
    `*a`), and its depth have limits.

    Example:
        >>> read_yaml("loss: dftopk", "my.yaml")
        {'loss': 'dftopk'}
        >>> read_yaml("[" * 100 + "]" * 100, "my.yaml")
        Traceback (most recent call last):
        ...
        recsys_topk.trust.source.UntrustedError: my.yaml is refused: values are nested deeper than 50
    """
    check_bounds(text, source)
    try:
        return yaml.load(text, Loader=_PARSER)  # a safe loader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} is not valid YAML: {_plain(error)}") from error


def read_yaml_file(path: Path) -> Any:
    """Return the plain values of a YAML file; see `read_yaml`."""
    return read_yaml(read_text(path), str(path))


def check_bounds(text: str, source: str) -> None:
    """Raise if a document is too long or too deep, has too many values with all aliases expanded, or is not YAML."""
    if len(text) > MAX_CHARACTERS:
        raise _refuse(source, f"it is longer than {MAX_CHARACTERS:,} characters")
    sizes: dict[str, int | None] = {}  # number of values of each anchor; None = the anchor is still open
    open_anchors: list[tuple[str | None, int]] = []
    total = 0
    try:
        for event in yaml.parse(text, Loader=_PARSER):
            if isinstance(event, yaml.AliasEvent):
                size = sizes.get(str(event.anchor), 0)
                if size is None:
                    raise _refuse(source, f"the alias *{event.anchor} refers to itself")
                total += size
            elif isinstance(event, yaml.ScalarEvent):
                total += 1
                if not event.style and len(event.value) > MAX_PLAIN:
                    raise _refuse(source, f"a value without quotes is longer than {MAX_PLAIN} characters")
                if event.anchor:
                    sizes[event.anchor] = 1
            elif isinstance(event, yaml.CollectionStartEvent):
                total += 1
                open_anchors.append((event.anchor, total))
                if event.anchor:
                    sizes[event.anchor] = None
                if len(open_anchors) > MAX_DEPTH:
                    raise _refuse(source, f"values are nested deeper than {MAX_DEPTH}")
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_anchors.pop()
                if anchor:
                    sizes[anchor] = total - before + 1
            if total > MAX_VALUES:
                raise _refuse(source, f"it has more than {MAX_VALUES:,} values")
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {_plain(error)}") from error


def _plain(error: Exception) -> str:
    """Return an error of the YAML parser as one line, without the name that it gives to text."""
    return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())


def inspect_config(content: Any, source: str, trust: tuple[str, ...] = ()) -> None:
    """Raise if a config names a class that is not allowed, directly or in YAML text or other configs inside it."""
    inspect_names(content, source, trust, _expand_in(Path(), [MAX_VALUES]))


def _expand_in(folder: Path, budget: list[int]) -> Expand:
    """Return a function that expands a string like jsonargparse: the path of a config in `folder`, or YAML text."""

    def expand(text: str, source: str) -> tuple[Any, str, Expand] | None:
        budget[0] -= 1 + len(text) // 100
        if budget[0] < 0:
            raise _refuse(source, "it refers to too many other configs, or to itself")
        path = _existing(folder, text)
        if path is not None:
            try:
                return read_yaml_file(path), f"config {str(path)!r}", _expand_in(path.parent, budget)
            except (ValueError, OSError):
                if path.suffix in CONFIG_SUFFIXES:
                    raise
                return None  # not a config; `guarded` raises if the parser reads it as one
        if not any(mark in text for mark in "[{:\n&*!?") and not text.lstrip().startswith("-"):
            return None
        try:
            content = read_yaml(text, f"text in {source} ({text[:40]!r})")
        except UntrustedError:
            raise
        except ValueError:
            if "class_path" in text:  # another parser may be able to read it
                raise _refuse(source, f"the text {text[:40]!r} has a class_path but is not valid YAML") from None
            return None  # an ordinary string
        return (content, source, expand) if isinstance(content, (dict, list)) else None

    return expand


def _existing(folder: Path, text: str) -> Path | None:
    if not text or len(text) > 1024 or "\n" in text or "\0" in text:
        return None
    try:
        paths = [path for path in (folder / text, Path(text)) if path.is_file()]
    except OSError:
        return None
    return paths[0] if paths else None


def read_text(path: Path) -> str:
    """Return the text of a file up to the limit of `read_yaml`; raise with its name if it is not text."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error


def _refuse(source: str, why: str) -> UntrustedError:
    return UntrustedError(f"{source} is refused: {why}")
