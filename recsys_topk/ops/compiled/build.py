"""How the functions of this package are compiled and cached on disk."""

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
from recsys_topk.ops.jit import jit

F = TypeVar("F", bound=Callable[..., Any])


# The files of this package, and the one that defines the record that the kernels read.
_sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(task.__file__)]
FINGERPRINT = hashlib.sha256(b"".join(file.read_bytes() for file in _sources)).hexdigest()


class _PackageCache(FunctionCache):
    """A cache on disk whose key changes with every source file of the package.

    The key of numba depends on the file of a function, but not on the files of the functions that it calls. If a
    function calls a function of its closure, the key of numba differs in every process.
    """

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (sig, codegen.magic_tuple(), FINGERPRINT)


def _kept(made: Any, function: Any) -> Any:
    """Return a compiled function after giving it the cache on disk."""
    made._cache = _PackageCache(function)  # type: ignore[no-untyped-call]
    return made


class native:  # noqa: N801  # used as a decorator
    """A function of the address of a task, compiled to a C function that any thread can call without Python.

    Args:
        function: Takes an int64 and returns nothing.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        """Address of the machine code. The first access compiles it or reads it from disk."""
        options = {"fastmath": {"contract", "arcp"}, "error_model": "numpy"}
        made = _kept(CFunc(self.function, ((types.int64,), types.void), locals={}, options=options), self.function)
        made.compile()
        self._made = made  # owns the machine code
        return int(made.address)


def compiled(function: F) -> F:
    """Compile at the first call and cache on disk. Runs without the GIL; sums may be reordered, NaN is preserved."""
    flags = {"reassoc", "contract", "nsz", "arcp"}
    return cast(F, _kept(numba.njit(nogil=True, fastmath=flags, error_model="numpy")(function), function))


class loop(jit[None]):  # noqa: N801  # used as a decorator
    """A loop over lists for `recsys_topk.ops.parallel.run_parts`, compiled as `compiled` does."""

    @cached_property
    def _compiled(self) -> Any:
        return compiled(self.function)


def inlined(function: F) -> F:
    """Compile a function into its callers. Its operations are not reordered, because their rounding matters."""
    make: Any = numba.njit
    flags = {"contract", "arcp"}
    return cast(F, make(fastmath=flags, error_model="numpy", forceinline=True, no_cpython_wrapper=True)(function))
