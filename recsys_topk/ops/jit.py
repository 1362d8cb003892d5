"""Loops compiled for the CPU by numba, which is imported at the first call of one and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

# The constant of float32 loops: a Python 0.0 would make numba compute in float64.
ZERO = np.float32(0.0)

T = TypeVar("T")


class jit(Generic[T]):  # noqa: N801  # used as a decorator
    """Compile a function at its first call (a few seconds), without the GIL, and keep it on disk for later processes.

    Sums may be reordered, else they are not vectorised; NaN and infinity are kept. Pass float32 and int64 arrays only,
    so that each function is compiled once. Indices are trusted. Write a maximum as ``0 if x < 0 else x``, so that NaN
    stays NaN as in `torch.relu`.

    Args:
        function: The function, in what numba understands of Python.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self._compiled: Any = None

    def __call__(self, *args: Any) -> T:
        """Call the compiled function."""
        if self._compiled is None:
            import numba

            flags = {"reassoc", "contract", "nsz", "arcp"}
            make = numba.njit(nogil=True, cache=True, fastmath=flags, error_model="numpy")
            self._compiled = make(self.function)
        result: T = self._compiled(*args)
        return result
