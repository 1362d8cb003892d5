"""Whether class paths come from the user or from a file, and which packages the user trusts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from recsys_topk.files import check_once, check_zip

_reading: ContextVar[tuple[str, ...] | None] = ContextVar("reading", default=None)


class UntrustedError(ValueError):
    """A file names a class that is not allowed, or exceeds the limits of its reader."""


@contextmanager
def reading(trust: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Treat every name that is resolved inside this context as a name from a file.

    Args:
        trust: Further packages or class paths that the file may name. Nested contexts add to the outer ones.

    Example:
        >>> from recsys_topk.trust import is_allowed
        >>> with reading(["my_package"]):
        ...     is_allowed("my_package.MyLoss"), is_allowed("my_package2.MyLoss"), is_allowed("timeit.Timer")
        (True, False, False)
    """
    names = tuple(dict.fromkeys((*trusted(), *trust)))
    token = _reading.set(names)
    try:
        yield names
    finally:
        _reading.reset(token)


@contextmanager
def loading(source: Any, options: dict[str, Any], trust: Iterable[str] = ()) -> Iterator[None]:
    """Make a call of Lightning's `load_from_checkpoint` safe: a whole file, safe unpickling, `reading` for all names.

    `options`, the keyword arguments of the call, are modified in place. `source` names the checkpoint in messages.
    """
    if options.get("weights_only") is None:
        options["weights_only"] = True
    options["_instantiator"] = None  # a function that Lightning would take from the checkpoint
    if isinstance(source, (str, Path)) and Path(source).is_file():
        check_once([Path(source)], check_zip)
    try:
        with reading(trust):
            yield
    except UntrustedError as error:
        raise UntrustedError(f"{source}: {error}") from None


def trusted() -> tuple[str, ...]:
    """Return the packages and class paths that the enclosing `reading` trusts."""
    return _reading.get() or ()


def from_file() -> bool:
    """Return whether names come from a file, that is, whether the caller is inside `reading`."""
    return _reading.get() is not None
