"""Read RecFlow's pickle files without executing code from them."""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.tabular.locations import AnyPath, version_of

_MEMORY_PER_BYTE: Final = 32
_LEAST_MEMORY: Final = 256 * 2**20
"""Memory for a pickle: small integers and arrays take about ten times their size in the file."""


class FormatError(ValueError):
    """Raised if a file does not have RecFlow's format. The message names the file and, if known, the request."""


def _encode(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode`, with which protocols 0 to 2 write bytes. They use only this encoding."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}; only latin1 occurs in pickles of arrays")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    """Replace `bytes`, with which protocols 0 to 2 write the content of an empty array."""
    return b""


def _empty_tuple() -> tuple[()]:
    """Replace the default factories of RecFlow's dictionaries. Never called, since only existing keys are read."""
    return ()


class StoredArray:
    """An array as stored in the pickle: shape, dtype and bytes. No numpy array is made yet.

    A day has millions of small arrays, which are only used concatenated. Keeping their bytes costs half as much as
    making arrays. The reconstruction function of numpy, which a malicious state could attack, is never called.
    """

    __slots__ = ("state",)
    state: tuple[int, tuple[int, ...], np.dtype[Any], bool, bytes]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> npt.NDArray[Any]:
        """Return the array. Raise ValueError or TypeError if the stored state is not an array of plain numbers."""
        _, shape, dtype, fortran, data = self.state
        return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _reconstruct(kind: Any, shape: Any, code: Any) -> StoredArray:
    """Replace numpy's function of this name, which protocols up to 4 call before they set the state."""
    return StoredArray()


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> StoredArray:
    """Replace numpy's function of this name, which protocol 5 calls."""
    stored = StoredArray()
    stored.state = (1, shape, dtype, order == "F", bytes(buffer))
    return stored


# Taken from numpy itself, since the module of the function changed between numpy 1 and 2.
_SCALAR: Any = np.int64(0).__reduce__()[0]

# All names needed to build dicts, arrays, ints and strings. None of them can call other code.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("collections", "defaultdict"): defaultdict,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): StoredArray,
    **{(module, "bytes"): _empty_bytes for module in ("builtins", "__builtin__")},
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (dict, int, list, str, tuple)
    },
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _SCALAR),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}
_FACTORIES = ("defaultdict_tuple", "defaultdict_str")


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the garbage collector: the pickles of a day hold a million containers without reference cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _bounded_memory(size: int) -> Iterator[None]:
    """Raise MemoryError if this process takes `size` more bytes of address space. Only on Linux."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(statm.read_text().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (wanted if before[0] < 0 else min(wanted, before[0]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: AnyPath) -> None:
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
                f"does not need; nothing was run. Get the file from its source again, or do not use it"
            ) from None
        return found


def load_pickle(path: AnyPath) -> Any:
    """Load a pickle of dicts, defaultdicts, arrays of numbers, ints and strings; arrays become `StoredArray`.

    A pickle is a program: it may name any importable function and call it. This reader resolves only the names that
    rebuild the types above, for any numpy version, and RecFlow's `defaultdict_tuple` and `defaultdict_str` factories.
    Any other name is refused when it is looked up, before it can be called.

    Args:
        path: The file.

    Raises:
        FormatError: The file names another class or function, is truncated, is not a pickle, or needs more memory than
            32 times its size and 256 MB.
        FileNotFoundError: The file does not exist.

    Example:
        >>> import pickle, tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "id_cnt.pkl"
        >>> _ = path.write_bytes(pickle.dumps({"user_id": 3}))
        >>> load_pickle(path)
        {'user_id': 3}
    """
    with path.open("rb") as file:
        try:
            with _bounded_memory(_LEAST_MEMORY + _MEMORY_PER_BYTE * version_of(path)[0]):
                return _RestrictedUnpickler(file, path).load()
        except FormatError:
            raise
        except MemoryError:
            raise FormatError(
                f"{path} asks for more than {_MEMORY_PER_BYTE} times the memory of its size, or than there is; it is "
                f"damaged or hostile; get it again"
            ) from None
        except Exception as error:
            raise FormatError(
                f"{path} is not a whole pickle ({type(error).__name__}: {error}); get it again"
            ) from error
