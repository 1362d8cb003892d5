"""Classes by their path: checked, then imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recsys_topk.trust.allowed import check_name
from recsys_topk.trust.class_paths import class_path, is_covered, locate
from recsys_topk.trust.lists import PACKAGE
from recsys_topk.trust.source import UntrustedError, from_file


def load_class(path: str, base: type[Any], *, trust: Iterable[str] | None = None, where: str = "") -> type[Any]:
    """Import a class by its path and check its base class. The class is not called.

    Args:
        path: The class path.
        base: Required base class.
        trust: None = the user typed the path (unless inside `reading`). Otherwise the path comes from a file, which may
            also name classes of these packages.
        where: The file, for messages.

    Example:
        >>> load_class("collections.OrderedDict", dict).__name__
        'OrderedDict'
        >>> load_class("os.system", dict)
        Traceback (most recent call last):
        ...
        recsys_topk.trust.source.UntrustedError: 'os.system' is not a subclass of builtins.dict; ...
    """
    strict = trust is not None or from_file()
    if strict:
        check_name(path, where=where or "a description", trust=trust or ())
    try:
        found = locate(path)
    except ImportError:
        found = _moved(path, base)
        if found is None:
            raise
    if not isinstance(found, type) or not issubclass(found, base):
        raise UntrustedError(f"{path!r} is not a subclass of {class_path(base)}; give the path of a subclass")
    if strict and class_path(found) != path:
        check_name(class_path(found), where=f"{where or 'a description'} ({path})", trust=trust or ())
    return found


def _moved(path: str, base: type) -> type | None:
    """Return the imported class of this package that had the path `path` in an earlier version, or None."""
    pending, name = [base], path.rpartition(".")[2]
    while pending and path.startswith(f"{PACKAGE}."):
        cls = pending.pop()
        if cls.__name__ == name and is_covered(cls.__module__, [PACKAGE]):
            return cls
        pending += cls.__subclasses__()
    return None
