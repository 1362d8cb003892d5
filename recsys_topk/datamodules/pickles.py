"""Open RecFlow's pickles without running anything that is in them."""

from __future__ import annotations

import gc
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class FormatError(ValueError):
    """A file that does not hold what RecFlow's format says. The message names the file and, if any, the request."""


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, by which protocols 0 to 2 write bytes; they use this encoding only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}; only latin1 occurs in pickles of arrays")
    return text.encode("latin1")


def _empty_tuple() -> tuple[()]:
    """Stand in for the default factories of RecFlow's own dictionaries; never called, since keys are looked up."""
    return ()


# Asked of numpy itself, since their home moved between numpy 1 and 2.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_SCALAR: Any = np.int64(0).__reduce__()[0]
_FROM_BUFFER: Any = np.empty(0).__reduce_ex__(5)[0]

# Everything that building dicts, arrays, ints and strings takes, and nothing that calls anything else.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("collections", "defaultdict"): defaultdict,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (dict, int, list, str, tuple)
    },
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _RECONSTRUCT),
            ("multiarray", "scalar", _SCALAR),
            ("numeric", "_frombuffer", _FROM_BUFFER),
        )
    },
}
_FACTORIES = ("defaultdict_tuple", "defaultdict_str")


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if name in _FACTORIES:
            return _empty_tuple
        try:
            found: Callable[..., Any] = _ADMITTED[module, name]
        except KeyError:
            raise FormatError(
                f"{self._path} asks for {module}.{name} when it is opened, which a file of dicts and integer arrays "
                f"has no use for; nothing was run. Get the file from its source again, or leave it alone"
            ) from None
        return found


def load_pickle(path: Path) -> Any:
    """Return what a pickle of dicts, defaultdicts, arrays of numbers, ints and strings holds.

    A pickle is a program: it may name any importable function and call it. This reader resolves only the names that
    rebuild the types above, whichever numpy wrote them, and RecFlow's own `defaultdict_tuple` and `defaultdict_str`
    factories; any other name is refused at the moment it is looked up, before it could be called.

    Args:
        path: The file.

    Raises:
        FormatError: Another class or function is named, or the file is truncated or not a pickle.
        FileNotFoundError: There is no such file.

    Example:
        >>> import pickle, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "id_cnt.pkl"
        >>> _ = path.write_bytes(pickle.dumps({"user_id": 3}))
        >>> load_pickle(path)
        {'user_id': 3}
    """
    collecting = gc.isenabled()
    gc.disable()  # a million containers and no cycles: collecting while they are made doubles the time
    try:
        return _load(path)
    finally:
        if collecting:
            gc.enable()


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            return _RestrictedUnpickler(file, path).load()
        except FormatError:
            raise
        except MemoryError:
            raise FormatError(f"{path} asks for more memory than there is; it is damaged or hostile") from None
        except Exception as error:
            raise FormatError(
                f"{path} is not a whole pickle ({type(error).__name__}: {error}); get it again"
            ) from error
