"""Checks of the class paths in checkpoints, configs and run directories before they are imported.

A *name* is a class path such as ``"my_package.MyLoss"``. Its source decides which classes are allowed:

- typed by the user or written in the user's program: any importable class that is a subclass of the expected base;
- read from a file: a class of this package that configures a run (`OWN`), a class of `HARMLESS` (Lightning and torch),
  a class of an installed plug-in (entry points of `recsys_topk.*`), a class that the program registered itself, or a
  class of a package that the user trusts (``--trust my_package``, ``trust=["my_package"]``).

Names that are resolved inside `reading` come from a file. `inspect_names` checks plain values before a parser sees
them. The package has five more modules: `lists` defines the allowed classes, `documents` reads YAML within limits,
`guard` restricts jsonargparse to the allowed classes, `typed` finds the packages that a typed config trusts, and
`own_runs` records them when a run starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from recsys_topk.trust.lists import BROAD, CLASS_KEYS, HARMLESS_NAMES, PACKAGE, TEXT_KEYS
from recsys_topk.trust.lists import HARMLESS as HARMLESS
from recsys_topk.trust.lists import OWN as OWN

# A function from a string and its source to the values that a parser would read from it, their source, and the function
# that expands strings among these values.
Expand: TypeAlias = "Callable[[str, str], tuple[Any, str, Expand] | None]"

MAX_DEPTH = 50
MAX_VALUES = 100_000

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PADDING = "\"' \t\r\n"  # characters that a parser strips from a name
_ADDRESS = re.compile(r"://|::")
_reading: ContextVar[tuple[str, ...] | None] = ContextVar("reading", default=None)
_registered: set[str] = set()


class UntrustedError(ValueError):
    """A file names a class that is not allowed, or exceeds the limits of its reader."""


@contextmanager
def reading(trust: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Treat every name that is resolved inside this context as a name from a file.

    Args:
        trust: Further packages or class paths that the file may name. Nested contexts add to the outer ones.

    Example:
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
    """Make a call of Lightning's `load_from_checkpoint` safe: safe unpickling, and `reading` for all names.

    Args:
        source: The checkpoint, for messages.
        options: The keyword arguments of the call; modified in place.
        trust: See `reading`.
    """
    if options.get("weights_only") is None:
        options["weights_only"] = True
    options["_instantiator"] = None  # a function that Lightning would take from the checkpoint
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


def allow_registered(cls: type) -> None:
    """Allow files to name `cls`, because the program itself imported and registered it."""
    _registered.add(class_path(cls))


def printable(text: str) -> str:
    r"""Return text from a file with control characters escaped, so that it is safe to print on a terminal.

    Example:
        >>> printable("a" + chr(27) + "[2J")
        'a\\x1b[2J'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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


def is_allowed(path: str, trust: Iterable[str] = ()) -> bool:
    """Return whether a file may name the class `path`. Only modules of this package are imported.

    Args:
        path: A class path, or a class name without a module.
        trust: Packages or class paths that are trusted besides those of the enclosing `reading`.

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
        return path in HARMLESS_NAMES or _is_loaded(path)
    return _is_harmless(path) or is_covered(path, _plugin_modules())


def names_for_parser(trust: Iterable[str] = ()) -> list[str]:
    """Return the allowed modules and class paths, including the paths at which the classes are defined."""
    names = {*OWN, *_registered, *_plugin_modules(), *trusted(), *trust}
    package = sys.modules[PACKAGE]
    for name in dir(package):  # a parser uses the shortest path of a class
        found = getattr(package, name)
        if isinstance(found, type) and is_covered(class_path(found), OWN):
            names.add(f"{PACKAGE}.{name}")
    for home, classes in HARMLESS.items():
        for name in classes:
            names |= {f"{home}.{name}"}
            found = getattr(sys.modules.get(home), name, None)
            if isinstance(found, type):
                names.add(class_path(found))
    return sorted(name for name in names if all(part.isidentifier() for part in name.split(".")))


def names_of_typed(value: str) -> tuple[str, ...]:
    """Return the names that are trusted if the user types `value`.

    This is the package of a class path, or the class path alone if the package is in `BROAD`.

    Example:
        >>> names_of_typed("my_package.losses.MyLoss"), names_of_typed("torch.nn.ReLU"), names_of_typed("dftopk")
        (('my_package',), ('torch.nn.ReLU',), ())
    """
    if not _DOTTED.fullmatch(value):
        return ()
    package = value.partition(".")[0]
    if package == PACKAGE or _is_harmless(value):
        return ()
    return (value,) if package in BROAD else (package,)


def what_to_trust(path: str) -> str:
    """Return the value of `--trust` for the class `path`: its package, or the class path if the package is `BROAD`."""
    package = path.partition(".")[0]
    return path if package in BROAD else package


def check_name(path: str, *, where: str, trust: Iterable[str] = ()) -> None:
    """Raise if a file may not name the class `path`.

    Args:
        path: The class path.
        where: The file and the position in it, for messages.
        trust: See `is_allowed`.
    """
    if not is_allowed(path, trust):
        needed = what_to_trust(path)
        raise UntrustedError(
            f"{where} names {path!r}, which is not a class of {PACKAGE} that a file may name, not a class of an "
            f"installed plug-in, and not on the list of harmless classes; it was not imported. If you trust the file "
            f"and the package, add --trust {needed} (in Python: trust=[{needed!r}])"
        )


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
        recsys_topk.trust.UntrustedError: 'os.system' is not a subclass of builtins.dict; give the path of a subclass
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


def locate(path: str) -> Any:
    """Return the object at a dotted path. Raise ImportError if it does not exist."""
    module_name, _, rest = path.rpartition(".")
    names = [rest]
    while module_name:
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not is_covered(module_name, [error.name]):
                raise
            module_name, _, outer = module_name.rpartition(".")
            names.insert(0, outer)
            continue
        for name in names:
            try:
                found = getattr(found, name)
            except AttributeError:
                raise ImportError(f"cannot find {path!r}: {module_name} has no attribute {'.'.join(names)}") from None
        return found
    raise ImportError(f"cannot find a module for {path!r}")


def _moved(path: str, base: type) -> type | None:
    """Return the imported class of this package that had the path `path` in an earlier version, or None."""
    pending, name = [base], path.rpartition(".")[2]
    while pending and path.startswith(f"{PACKAGE}."):
        cls = pending.pop()
        if cls.__name__ == name and is_covered(cls.__module__, [PACKAGE]):
            return cls
        pending += cls.__subclasses__()
    return None


def inspect_names(
    value: Any,
    source: str,
    trust: Collection[str] = (),
    expand: Expand | None = None,
) -> None:
    """Raise if plain values from a file name a class that is not allowed, before any object is built from them.

    The function checks every `class_path`, every string where a class is expected (`CLASS_KEYS`), every other string
    that looks like an importable path, and `weights_only`, which a file cannot turn off. No string may contain an
    address (``ftp://host/x``, chains such as ``simplecache::...``), because Lightning would connect to it.

    Args:
        value: Mappings, lists and scalars from YAML or a checkpoint.
        source: The file, for messages.
        trust: See `is_allowed`.
        expand: A function of a string and its source. It returns the values that a parser would read from the string
            (YAML text, or the path of another config), their source, and a function that expands strings among them;
            None for an ordinary string.

    Example:
        >>> inspect_names({"loss": {"class_path": "recsys_topk.losses.DFTopKLoss"}, "name": "a.b"}, "my.yaml")
        >>> inspect_names({"trainer": {"callbacks": ["timeit.Timer"]}}, "my.yaml")
        Traceback (most recent call last):
        ...
        recsys_topk.trust.UntrustedError: my.yaml (trainer.callbacks) names 'timeit.Timer', which is not a class of ...
    """
    count = 0

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
            raise UntrustedError(
                f"{where} contains the address {part[:80]!r}, but a file may contain local paths only; remove it from "
                f"the file, and pass it on the command line if you need it"
            )
        elif isinstance(part, str) and (key not in TEXT_KEYS or "metrics" in keys):  # a metric's `name` may be a path
            found = expand(part, source) if expand is not None else None
            if found is not None:
                walk(found[0], (*keys, ""), found[1], found[2])
            elif _names_class(bare := part.strip(_PADDING), keys, key):
                check_name(bare, where=where, trust=trust)

    walk(value, (), source, expand)


def _names_class(text: str, keys: tuple[str, ...], key: str) -> bool:
    if "." not in text:  # a registry name; below `trainer`, Lightning's parser finds imported classes by class name
        return key in CLASS_KEYS and "trainer" in keys and text[:1].isupper() and text.isidentifier()
    if not _DOTTED.fullmatch(text):
        return False
    return key in CLASS_KEYS or _is_findable(text.partition(".")[0])


def _is_findable(package: str) -> bool:
    """Return whether the top-level `package` can be imported. It is not imported."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return True


def _is_harmless(path: str) -> bool:
    package, _, name = path.rpartition(".")
    return any(name in names and is_covered(package, [home]) for home, names in HARMLESS.items())


def _is_own(path: str) -> bool:
    try:
        found = locate(path)
    except ImportError:
        return True  # it does not exist, so it cannot be built; the registry raises a better error
    return isinstance(found, type) and is_covered(class_path(found), OWN)


def _is_loaded(name: str) -> bool:
    """Return whether `name` is a class of this package or registered. A parser finds these by their class name."""
    if any(path.rpartition(".")[2] == name for path in _registered):
        return True
    ours = [module for key, module in list(sys.modules.items()) if is_covered(key, [PACKAGE])]
    found = [vars(module).get(name) for module in ours]
    return any(isinstance(cls, type) and is_covered(class_path(cls), OWN) for cls in found)


@cache
def _plugin_modules() -> tuple[str, ...]:
    """Return the modules that installed distributions name as plug-ins of this package."""
    found = entry_points()
    groups = [group for group in found.groups if is_covered(group, [PACKAGE])]
    return tuple(sorted({point.module for group in groups for point in found.select(group=group)}))
