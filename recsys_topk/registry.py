"""A table from names to classes, filled by subclassing and entry points. Errors suggest the nearest name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from recsys_topk.trust import allow_registered, class_path, load_class

T = TypeVar("T")


class UnknownNameError(ValueError):
    """An unknown name. The message lists the available names and the nearest match."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if none is close.

    Example:
        >>> nearest("dftpk", ["dftopk", "lapsum"])
        'dftopk'
    """
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def suggest(name: str, known: Iterable[str], shown: str = "{!r}") -> str:
    """Return a hint for a message about an unknown name, followed by a space; empty if no known name is close.

    Example:
        >>> suggest("dftpk", ["dftopk", "lapsum"]), suggest("x", ["dftopk"])
        ("did you mean 'dftopk'? ", '')
    """
    close = nearest(name, known)
    return f"did you mean {shown.format(close)}? " if close else ""


class Registry(Generic[T]):
    """A table from names to classes of one kind (losses, operators, ...), filled by subclassing.

    A class is registered when its base class calls `register` from `__init_subclass__`. The modules that define the
    classes are imported on first use: every module of `package`, then every entry point of `group`. A new class is
    therefore one new file inside the package, or one entry point outside it. An entry point that cannot be imported is
    skipped with a warning.

    Args:
        kind: Name of the kind in messages, e.g. ``"loss"``.
        package: Dotted name of the package whose modules define the built-in classes.
        group: Entry-point group through which other distributions add classes.
        base: Required base class; None = a class path must lead to a registered class.
        module: Import only this module of each sub-package of `package` that has it, instead of every module.

    Example:
        >>> from recsys_topk.losses import registry
        >>> registry.resolve("dftopk").__name__
        'DFTopKLoss'
    """

    def __init__(
        self, kind: str, package: str, group: str, base: type[T] | None = None, module: str | None = None
    ) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self.base = base
        self.module = module
        self._classes: dict[str, type[T]] = {}
        self._discovered = False

    def register(self, name: str, cls: type[T]) -> None:
        """Add `cls` under `name`. Raise if a different class has that name."""
        existing = self._classes.get(name)
        if existing is not None and (existing.__module__, existing.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{self.kind} name {name!r} is already used by {existing.__module__}.{existing.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another `name`"
            )
        self._classes[name] = cls
        allow_registered(cls)

    def discover(self) -> None:
        """Import every module that may define a class of this kind. Further calls do nothing."""
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
            try:
                entry_point.load()
            except Exception as error:  # a broken third-party module must not break the other classes
                warnings.warn(
                    f"the plug-in {entry_point.name!r} ({entry_point.value}, entry point of {self.group}) cannot be "
                    f"imported and is skipped: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def available(self) -> tuple[str, ...]:
        """Return all names, sorted."""
        self.discover()
        return tuple(sorted(self._classes))

    def classes(self) -> dict[str, type[T]]:
        """Return all classes by name."""
        return {name: self._classes[name] for name in self.available()}

    def resolve(self, name: str, *, trust: Iterable[str] | None = None) -> type[T]:
        """Return the class called `name`: a registered name, a class name, or a dotted class path.

        Args:
            name: The name; ``-`` is accepted for ``_``.
            trust: None = the user typed the name: a class path is imported and must lead to a subclass of the base.
                Otherwise, and inside `recsys_topk.trust.reading`, the name comes from a file: a class path must be
                trusted by `recsys_topk.trust` or lie in one of these packages.
        """
        known = self._find(name)
        if known is None and name.isidentifier() and not self._discovered:  # its module alone, if it has one
            home = f"{self.package}.{name}"
            own = home if self.module is None else f"{home}.{self.module}"
            if importlib.util.find_spec(home) and importlib.util.find_spec(own):
                importlib.import_module(own)
                known = self._find(name)
        if known is None:
            self.discover()
            known = self._find(name)
        if known is not None:
            return known
        if "." not in name:
            raise self.unknown(name)
        try:
            return self._import(name, trust)
        except ImportError as error:
            raise UnknownNameError(f"cannot import {self.kind} {name!r}: {error}. {self.unknown(name)}") from error

    def get(self, name: str, /, **arguments: Any) -> T:
        """Create an instance of the class called `name` with `arguments`."""
        return self.resolve(name)(**arguments)

    def unknown(self, name: str) -> UnknownNameError:
        """Return the error for a name that is not in the table."""
        return UnknownNameError(
            f"unknown {self.kind} {name!r}; {suggest(name, self._classes)}available: {', '.join(self.available())} "
            f"(or the full class path of a subclass)"
        )

    def _find(self, name: str) -> type[T] | None:
        for spelling in (name, name.replace("-", "_")):
            if spelling in self._classes:
                return self._classes[spelling]
        return next((cls for cls in self._classes.values() if name in (cls.__name__, class_path(cls))), None)

    def _import(self, path: str, trust: Iterable[str] | None) -> type[T]:
        found: type[T] = load_class(path, self.base or object, trust=trust, where=f"the name of a {self.kind}")
        if self.base is None and found not in self._classes.values():
            raise UnknownNameError(f"{path!r} is not a registered {self.kind}; {self.unknown(path)}")
        return found
