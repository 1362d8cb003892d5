"""Loops compiled for the CPU by numba."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_topk.ops.backends.machine_code import Code, load

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

# The constant of float32 loops. With a Python 0.0, numba would compute in float64.
ZERO = np.float32(0.0)


class Loop:
    """A loop for `recsys_topk.ops.backends.parallel`. Its first call compiles it (seconds) or reads the disk.

    Args:
        path: Module and name of a function of `recsys_topk.ops.backends.compiled`, with a colon between them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._addresses: dict[tuple[str, ...], int] = {}

    def address(self, kinds: tuple[str, ...]) -> int:
        """Return the address of a C function that calls the loop; see `recsys_topk.ops.backends.entry.entry_code`."""
        if kinds not in self._addresses:
            self._addresses[kinds] = load(f"{self._name()}{kinds}", lambda: self._compile(kinds))
        return self._addresses[kinds]

    def _name(self) -> str:
        return self.path

    def _compile(self, kinds: tuple[str, ...]) -> Code:
        from recsys_topk.ops.backends.entry import entry_code

        return entry_code(self._dispatcher(), kinds)

    def _dispatcher(self) -> Any:
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)


class jit(Loop):  # noqa: N801  # used as a decorator
    """Make a `Loop` of a function that calls no function outside its file.

    The compiled function does not hold the GIL. Sums may be reordered, otherwise they are not vectorised; NaN and
    infinity are kept. Pass contiguous arrays of one type each, so that every function is compiled once. Indices are
    not checked. The function must not allocate memory and must not raise. Write a maximum as ``0 if x < 0 else x``, so
    that NaN stays NaN as in `torch.relu`.

    Args:
        function: The function, in the part of Python that numba supports.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(f"{function.__module__}:{function.__qualname__}")
        self.function = function
        self.__doc__ = function.__doc__

    def _name(self) -> str:
        source = Path(inspect.getfile(self.function)).read_bytes()
        return f"{hashlib.sha256(source).hexdigest()}:{self.function.__qualname__}"

    def _dispatcher(self) -> Any:
        from recsys_topk.ops.backends.compiled.build import compiled

        return compiled(self.function)
