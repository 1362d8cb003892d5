"""Class paths such as ``"my_package.MyLoss"``: of a class, in a package, and back to the object."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def class_path(cls: type) -> str:
    """Return the path at which a class is defined, e.g. ``"recsys_topk.losses.DFTopKLoss"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_covered(path: str, names: Iterable[str]) -> bool:
    """Return whether a class path is one of `names` or lies in a package among them.

    Example:
        >>> is_covered("a.b.C", ["a"]), is_covered("ab.C", ["a"])
        (True, False)
    """
    return any(path == name or path.startswith(f"{name}.") for name in names)


def locate(path: str) -> Any:
    """Return the object at a dotted path. Raise ImportError if it does not exist."""
    module_name, _, rest = path.rpartition(".")
    names = [rest]
    while module_name:
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not is_covered(module_name, [error.name]):
                raise
            module_name, _, outer = module_name.rpartition(".")
            names.insert(0, outer)
            continue
        for name in names:
            try:
                target = getattr(target, name)
            except AttributeError:
                raise ImportError(f"cannot find {path!r}: {module_name} has no attribute {'.'.join(names)}") from None
        return target
    raise ImportError(f"cannot find a module for {path!r}")
