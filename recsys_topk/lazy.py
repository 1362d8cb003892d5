"""Public names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(
    package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are imported on first use.

    Args:
        package: Name of the package, `__name__` in its ``__init__.py``.
        names: The public names by module: a module of the package, or the full name of another one.
        modules: Modules of the package that are attributes too, without an import statement.

    Example:
        >>> get, names = attach("recsys_topk", {"registry": ["Registry"]}, ["files"])
        >>> get("Registry").__module__, get("files").__name__
        ('recsys_topk.registry', 'recsys_topk.files')
        >>> get("Registri")
        Traceback (most recent call last):
            ...
        AttributeError: module 'recsys_topk' has no attribute 'Registri'
    """
    home = {name: module for module, listed in names.items() for name in listed}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        root = package.partition(".")[0]
        module = home[name] if home[name].startswith(f"{root}.") else f"{package}.{home[name]}"
        return getattr(import_module(module), name)

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home, *modules})

    return get, directory
