"""How the loops of this package are compiled and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from recsys_topk.ops import task

F = TypeVar("F", bound=Callable[..., Any])


# Of this package, and of the record that its loops read.
_sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(task.__file__)]
FINGERPRINT = hashlib.sha256(b"".join(file.read_bytes() for file in _sources)).hexdigest()


class _PackageCache(FunctionCache):
    """Compiled code on disk under a key that changes with every one of the sources.

    Numba's own key changes with the file of a function, but not with the files of the functions that it calls. For a
    function that calls one of its closure, numba's key differs in every process.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (sig, codegen.magic_tuple(), FINGERPRINT)


def _kept(made: Any, function: Any) -> Any:
    """Return something compiled of a function that from now on is kept on disk."""
    made._cache = _PackageCache(function)  # type: ignore[no-untyped-call]
    return made


class native:  # noqa: N801  # used as a decorator
    """A function of the address of a task that is compiled to a C function, which any thread can call without Python.

    Args:
        function: Takes an int64 and returns nothing.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        """Where the machine code is; compiled, or read from disk, at the first access."""
        options = {"fastmath": {"contract", "arcp"}, "error_model": "numpy"}
        made = _kept(CFunc(self.function, ((types.int64,), types.void), locals={}, options=options), self.function)
        made.compile()
        self._made = made  # owns the machine code
        return int(made.address)


def compiled(function: F) -> F:
    """Compile at the first call, without the GIL, and keep the result on disk. Sums may be reordered, NaN is kept."""
    flags = {"reassoc", "contract", "nsz", "arcp"}
    return cast(F, _kept(numba.njit(nogil=True, fastmath=flags, error_model="numpy")(function), function))


def inlined(function: F) -> F:
    """Compile a helper into its callers, without reordering what it computes: its roundings matter."""
    make: Any = numba.njit
    flags = {"contract", "arcp"}
    return cast(F, make(fastmath=flags, error_model="numpy", forceinline=True, no_cpython_wrapper=True)(function))
