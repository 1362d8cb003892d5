"""One generic table from names to classes: subclass registration, entry points, errors that name the nearest match."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class UnknownNameError(ValueError):
    """A name that no class answers to. The message lists what there is and the nearest match."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if none is close.

    Example:
        >>> nearest("dftpk", ["dftopk", "lapsum"])
        'dftopk'
    """
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    return matches[0] if matches else None


class Registry(Generic[T]):
    """Names of one kind of class (losses, operators, ...), filled by subclassing.

    A class enters the table when its base class calls `register` from `__init_subclass__`. The modules that define
    the classes are imported on first use: every module of `package`, then every entry point of `group`, so that a new
    class is one new file inside the package, or one entry point outside it.

    Args:
        kind: What the classes are called in messages, e.g. ``"loss"``.
        package: Dotted name of the package whose modules hold the built-in classes.
        group: Entry-point group by which other distributions add theirs.
        module: Import only this module of each sub-package of `package` that has it, instead of every module.

    Example:
        >>> from recsys_topk.losses import registry
        >>> registry.resolve("dftopk").__name__
        'DFTopKLoss'
    """

    def __init__(self, kind: str, package: str, group: str, module: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self.module = module
        self._classes: dict[str, type[T]] = {}
        self._discovered = False

    def register(self, name: str, cls: type[T]) -> None:
        """Add `cls` under `name`; a name taken by a class of another module is refused."""
        taken = self._classes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{self.kind} name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another `name`"
            )
        self._classes[name] = cls

    def discover(self) -> None:
        """Import every module that may define a class of this kind (once)."""
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{self.package}.{module.name}"
            if self.module is None:
                importlib.import_module(name)
            elif module.ispkg and importlib.util.find_spec(f"{name}.{self.module}"):
                importlib.import_module(f"{name}.{self.module}")
        for entry_point in entry_points(group=self.group):
            entry_point.load()

    def available(self) -> tuple[str, ...]:
        """Return all names, sorted."""
        self.discover()
        return tuple(sorted(self._classes))

    def classes(self) -> dict[str, type[T]]:
        """Return the whole table, by name."""
        return {name: self._classes[name] for name in self.available()}

    def resolve(self, name: str) -> type[T]:
        """Return the class called `name`: a registered name, a class name, or a dotted class path."""
        self.discover()
        if name in self._classes:
            return self._classes[name]
        for cls in self._classes.values():
            if cls.__name__ == name:
                return cls
        if "." in name:
            return self._import(name)
        raise self.unknown(name)

    def get(self, name: str, /, **arguments: Any) -> T:
        """Build the class called `name` with `arguments`."""
        return self.resolve(name)(**arguments)

    def unknown(self, name: str) -> UnknownNameError:
        """Return the error for a name that is not in the table."""
        close = nearest(name, self._classes)
        hint = f"did you mean {close!r}? " if close else ""
        return UnknownNameError(
            f"unknown {self.kind} {name!r}; {hint}available: {', '.join(self.available())} "
            f"(or the full class path of a subclass)"
        )

    def _import(self, path: str) -> type[T]:
        module_name, _, class_name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise UnknownNameError(f"cannot import {self.kind} {path!r}: {error}. {self.unknown(path)}") from error
        if not isinstance(found, type):
            raise UnknownNameError(f"{path!r} is not a class, so it cannot be a {self.kind}")
        return found
