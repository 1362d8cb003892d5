"""Loops compiled for the CPU by numba. Numba is imported when the first loop is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

# The constant of float32 loops. With a Python 0.0, numba would compute in float64.
ZERO = np.float32(0.0)

T = TypeVar("T")


class jit(Generic[T]):  # noqa: N801  # used as a decorator
    """Compile a function at its first call (a few seconds), and keep the result on disk for later processes.

    The compiled function does not hold the GIL. Sums may be reordered, otherwise they are not vectorised; NaN and
    infinity are kept. Pass contiguous arrays of one type each, so that every function is compiled once. Indices are
    not checked. Write a maximum as ``0 if x < 0 else x``, so that NaN stays NaN as in `torch.relu`.

    Args:
        function: The function, in the part of Python that numba supports.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._entries: dict[tuple[str, ...], Any] = {}

    def __call__(self, *args: Any) -> T:
        """Call the compiled function."""
        result: T = self._compiled(*args)
        return result

    def address(self, kinds: tuple[str, ...]) -> int:
        """Return the address of a C function that calls this function; see `recsys_topk.ops.entry.make_entry`."""
        if kinds not in self._entries:
            from recsys_topk.ops.entry import make_entry

            self._entries[kinds] = make_entry(self._compiled, kinds)  # owns the machine code
        return int(self._entries[kinds].address)

    @cached_property
    def _compiled(self) -> Any:
        import numba

        flags = {"reassoc", "contract", "nsz", "arcp"}
        return numba.njit(nogil=True, cache=True, fastmath=flags, error_model="numpy")(self.function)
