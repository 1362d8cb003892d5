"""How the functions of this package are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import _dynfunc, _helperlib  # type: ignore[attr-defined]
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.runtime import _nrt_python  # type: ignore[attr-defined]

from recsys_topk.ops.backends.machine_code import Code

F = TypeVar("F", bound=Callable[..., Any])


class native:  # noqa: N801  # used as a decorator
    """A function of an address, compiled to a C function for `recsys_topk.ops.backends.machine_code.Kernel`.

    Args:
        function: Takes an int64 and returns nothing.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def compile(self) -> Code:
        """Compile the function."""
        options = {"fastmath": {"contract", "arcp"}, "error_model": "numpy"}
        function: Any = CFunc(self.function, ((types.int64,), types.void), locals={}, options=options)
        function.compile()
        content = function._library._get_compiled_object()
        own: Any = _helperlib
        helpers = [f"numba_{name}" for name in (*own.c_helpers, *_dynfunc.c_helpers)]
        helpers += [name if name.startswith("_") else f"NRT_{name}" for name in _nrt_python.c_helpers]
        return Code(function.native_name, [name for name in helpers if name.encode() in content], content)


def compiled(function: F) -> F:
    """Compile at the first call. Runs without the GIL; sums may be reordered, NaN is preserved.

    The first arguments of a loop over lists are the number of the part, its first list, one past its last list, and the
    number of items N. Further arguments are those of the operation that calls it, with `steep` for 1 / tau. Arrays are
    given by their addresses (0 = None), and are float32 unless stated otherwise. `buffers` are (parts, rows, size) and
    overwritten, with `size` N rounded up to a multiple of `WIDTH`.
    """
    flags = {"reassoc", "contract", "nsz", "arcp"}
    return cast(F, numba.njit(nogil=True, fastmath=flags, error_model="numpy")(function))


def inlined(function: F) -> F:
    """Compile a function into its callers. Its operations are not reordered, because their rounding matters."""
    make: Any = numba.njit
    flags = {"contract", "arcp"}
    return cast(F, make(fastmath=flags, error_model="numpy", forceinline=True, no_cpython_wrapper=True)(function))
