"""Check of plain values from a file: every class path in them must be allowed."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from recsys_topk.text import printable
from recsys_topk.trust.allowed import DOTTED, check_name
from recsys_topk.trust.lists import CLASS_KEYS, TEXT_KEYS
from recsys_topk.trust.source import UntrustedError

# A function from a string and its source to the values that a parser would read from it, their source, and the function
# that expands strings among these values.
Expand: TypeAlias = "Callable[[str, str], tuple[Any, str, Expand] | None]"

MAX_DEPTH = 50
MAX_VALUES = 100_000

_PADDING = "\"' \t\r\n"  # characters that a parser strips from a name
_ADDRESS = re.compile(r"://|::")


def inspect_names(value: Any, source: str, trust: Collection[str] = (), expand: Expand | None = None) -> None:
    """Raise if plain values from a file name a class that is not allowed, before any object is built from them.

    The function checks every `class_path`, every string where a class is expected (`CLASS_KEYS`), every other string
    that looks like an importable path, and `weights_only`, which a file cannot turn off. No string may contain an
    address (``ftp://host/x``, chains such as ``simplecache::...``), because Lightning would connect to it.

    `source` names the file in messages. `expand` returns what a parser would read from a string (see `Expand`), or
    None.

    Example:
        >>> inspect_names({"loss": {"class_path": "recsys_topk.losses.DFTopKLoss"}, "name": "a.b"}, "my.yaml")
        >>> inspect_names({"trainer": {"callbacks": ["timeit.Timer"]}}, "my.yaml")
        Traceback (most recent call last):
        ...
        recsys_topk.trust.source.UntrustedError: my.yaml (trainer.callbacks) names 'timeit.Timer', which is not ...
    """
    count, given = 0, source

    def walk(part: Any, keys: tuple[str, ...], source: str, expand: Expand | None) -> None:
        nonlocal count
        count += 1
        if count > MAX_VALUES or len(keys) > MAX_DEPTH:
            limit = f"more than {MAX_VALUES} values" if count > MAX_VALUES else f"values nested deeper than {MAX_DEPTH}"
            raise UntrustedError(f"{source} has {limit}; it is refused")
        key = next((key for key in reversed(keys) if key), "")
        where = printable(f"{source} ({'.'.join(filter(None, keys))})" if any(keys) else source)
        if isinstance(part, Mapping):
            for name, inner in part.items():
                inside = str(name).rstrip("+").split(".")
                if inside[-1] == "weights_only" and inner not in (None, True):
                    raise UntrustedError(
                        f"{where} sets weights_only to {inner!r}, but a file cannot turn off safe loading; remove it"
                    )
                if inside[-1] == "class_path" and not isinstance(inner, str):
                    raise UntrustedError(f"{where}: class_path must be a string, got {type(inner).__name__}")
                walk(inner, (*keys, *inside), source, expand)
        elif isinstance(part, (list, tuple, set, frozenset)):
            for inner in part:
                walk(inner, (*keys, ""), source, expand)
        elif isinstance(part, str) and _ADDRESS.search(part):
            quoted = f"the address {part[:80]!r}" if source == given else "an address"  # not of a file that it names
            raise UntrustedError(
                f"{where} contains {quoted}, but a file may contain local paths only; remove it from the file, and "
                f"pass it on the command line if you need it"
            )
        elif isinstance(part, str) and (key not in TEXT_KEYS or "metrics" in keys):  # a metric's `name` may be a path
            expanded = expand(part, source) if expand is not None else None
            if expanded is not None:
                walk(expanded[0], (*keys, ""), expanded[1], expanded[2])
            elif _names_class(bare := part.strip(_PADDING), keys, key):
                check_name(bare, where=where, trust=trust)

    walk(value, (), source, expand)


def _names_class(text: str, keys: tuple[str, ...], key: str) -> bool:
    if "." not in text:  # a registry name; below `trainer`, Lightning's parser finds imported classes by class name
        return key in CLASS_KEYS and "trainer" in keys and text[:1].isupper() and text.isidentifier()
    if not DOTTED.fullmatch(text):
        return False
    return key in CLASS_KEYS or _is_findable(text.partition(".")[0])


def _is_findable(package: str) -> bool:
    """Return whether the top-level `package` can be imported. It is not imported."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return True
