"""Public names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, modules: Sequence[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are imported on first use.

    The public names are those that the package's ``__init__.py`` imports under ``if TYPE_CHECKING:``. They are written
    once, for type checkers and for Python. `modules` of the package are attributes too.

    Example:
        >>> get, names = attach("recsys_topk", ["files"])
        >>> get("Schema").__module__, get("files").__name__
        ('recsys_topk.tabular.schema', 'recsys_topk.files')
        >>> get("Shema")
        Traceback (most recent call last):
            ...
        AttributeError: module 'recsys_topk' has no attribute 'Shema'
    """

    @cache
    def homes() -> dict[str, str]:
        import ast

        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        blocks = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes()[name]), name)

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes(), *modules})

    return get, directory
