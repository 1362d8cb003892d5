"""The classes that a file may name, and their import."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from recsys_topk.trust.class_paths import class_path, is_covered, locate
from recsys_topk.trust.lists import BROAD, HARMLESS, HARMLESS_NAMES, OWN, PACKAGE
from recsys_topk.trust.source import UntrustedError, from_file, trusted

DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_registered: set[str] = set()


def allow_registered(cls: type) -> None:
    """Allow files to name `cls`, because the program itself imported and registered it."""
    _registered.add(class_path(cls))


def is_allowed(path: str, trust: Iterable[str] = ()) -> bool:
    """Return whether a file may name the class `path`. Only modules of this package are imported.

    `trust` adds packages or class paths to those of the enclosing `reading`.

    Example:
        >>> is_allowed("recsys_topk.losses.DFTopKLoss"), is_allowed("lightning.pytorch.callbacks.EarlyStopping")
        (True, True)
        >>> is_allowed("recsys_topk.checks.torch.load"), is_allowed("LambdaCallback")
        (False, False)
    """
    if is_covered(path, (*trusted(), *trust)) or path in _registered:
        return True
    if path.startswith(f"{PACKAGE}."):
        return _is_own(path)
    if "." not in path:
        return path in HARMLESS_NAMES or path in _loaded()
    return _is_harmless(path) or is_covered(path, _plugin_modules())


def check_name(path: str, *, where: str, trust: Iterable[str] = ()) -> None:
    """Raise if a file may not name the class `path`; `where` names the file and the position in it, for the message."""
    if not is_allowed(path, trust):
        needed = what_to_trust(path)
        raise UntrustedError(
            f"{where} names {path!r}, which is not a class of {PACKAGE} that a file may name, not a class of an "
            f"installed plug-in, and not on the list of harmless classes; it was not imported. If you trust the file "
            f"and the package, add --trust {needed} (in Python: trust=[{needed!r}])"
        )


def names_for_parser() -> list[str]:
    """Return the allowed modules and class paths, including the paths at which the classes are defined."""
    names = {*OWN, *_registered, *_plugin_modules(), *trusted()}
    # A parser uses the shortest path of a class. Classes that are not imported yet cannot be meant.
    names |= {f"{PACKAGE}.{name}" for name in _loaded().intersection(dir(sys.modules[PACKAGE]))}
    for home, classes in HARMLESS.items():
        for name in classes:
            names |= {f"{home}.{name}"}
            cls = getattr(sys.modules.get(home), name, None)
            if isinstance(cls, type):
                names.add(class_path(cls))
    return sorted(name for name in names if all(part.isidentifier() for part in name.split(".")))


def names_of_typed(value: str) -> tuple[str, ...]:
    """Return the names that are trusted if the user types `value`.

    This is the package of a class path, or the class path alone if the package is in `BROAD`.

    Example:
        >>> names_of_typed("my_package.losses.MyLoss"), names_of_typed("torch.nn.ReLU"), names_of_typed("dftopk")
        (('my_package',), ('torch.nn.ReLU',), ())
    """
    if not DOTTED.fullmatch(value):
        return ()
    package = value.partition(".")[0]
    if package == PACKAGE or _is_harmless(value):
        return ()
    return (value,) if package in BROAD else (package,)


def what_to_trust(path: str) -> str:
    """Return the value of `--trust` for the class `path`: its package, or the class path if the package is `BROAD`."""
    package = path.partition(".")[0]
    return path if package in BROAD else package


def _is_harmless(path: str) -> bool:
    package, _, name = path.rpartition(".")
    return any(name in names and is_covered(package, [home]) for home, names in HARMLESS.items())


def _is_own(path: str) -> bool:
    try:
        cls = locate(path)
    except ImportError:
        return True  # it does not exist, so it cannot be built; the registry raises a better error
    return isinstance(cls, type) and is_covered(class_path(cls), OWN)


def _loaded() -> set[str]:
    """Return the names of imported classes of this package and of registered ones. A parser finds these by name."""
    ours = [vars(module) for key, module in list(sys.modules.items()) if is_covered(key, [PACKAGE])]
    classes = [(name, cls) for own in ours for name, cls in list(own.items()) if isinstance(cls, type)]
    names = {path.rpartition(".")[2] for path in _registered}
    return names | {name for name, cls in classes if is_covered(class_path(cls), OWN)}


@cache
def _plugin_modules() -> tuple[str, ...]:
    """Return the modules that installed distributions name as plug-ins of this package."""
    installed = entry_points()
    groups = [group for group in installed.groups if is_covered(group, [PACKAGE])]
    return tuple(sorted({point.module for group in groups for point in installed.select(group=group)}))


def load_class(path: str, base: type[Any], *, trust: Iterable[str] | None = None, where: str = "") -> type[Any]:
    """Import a class by its path and check its base class. The class is not called.

    Without `trust`, the user typed the path (unless inside `reading`). Otherwise it comes from a file (`where`), which
    may also name classes of these packages.

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
        cls = locate(path)
    except ImportError:
        cls = _moved(path, base)
        if cls is None:
            raise
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise UntrustedError(f"{path!r} is not a subclass of {class_path(base)}; give the path of a subclass")
    if strict and class_path(cls) != path:
        check_name(class_path(cls), where=f"{where or 'a description'} ({path})", trust=trust or ())
    return cls


def _moved(path: str, base: type) -> type | None:
    """Return the imported class of this package that had the path `path` in an earlier version, or None."""
    pending, name = [base], path.rpartition(".")[2]
    while pending and path.startswith(f"{PACKAGE}."):
        cls = pending.pop()
        if cls.__name__ == name and is_covered(cls.__module__, [PACKAGE]):
            return cls
        pending += cls.__subclasses__()
    return None
