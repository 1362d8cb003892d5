"""Open RecFlow's pickles without running anything that is in them."""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.locations import AnyPath


class FormatError(ValueError):
    """A file that does not hold what RecFlow's format says. The message names the file and, if any, the request."""


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, by which protocols 0 to 2 write bytes; they use this encoding only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}; only latin1 occurs in pickles of arrays")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    """Stand in for `bytes`, by which protocols 0 to 2 write the content of an empty array."""
    return b""


def _empty_tuple() -> tuple[()]:
    """Stand in for the default factories of RecFlow's own dictionaries; never called, since keys are looked up."""
    return ()


class StoredArray:
    """An array as the pickle stores it: shape, type and bytes, of which no array was made yet.

    A day holds millions of small arrays, which are wanted only joined. Keeping their bytes is half the work of making
    arrays of them, and numpy's own reconstruction, which hostile states could reach, is never called.
    """

    __slots__ = ("state",)
    state: tuple[int, tuple[int, ...], np.dtype[Any], bool, bytes]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> npt.NDArray[Any]:
        """Return the array; raises ValueError or TypeError if the stored state is none of plain numbers."""
        _, shape, dtype, fortran, data = self.state
        return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _reconstruct(kind: Any, shape: Any, code: Any) -> StoredArray:
    """Stand in for numpy's function of that name, which protocols up to 4 call before they set the state."""
    return StoredArray()


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> StoredArray:
    """Stand in for numpy's function of that name, which protocol 5 calls."""
    stored = StoredArray()
    stored.state = (1, shape, dtype, order == "F", bytes(buffer))
    return stored


# Asked of numpy itself, since its home moved between numpy 1 and 2.
_SCALAR: Any = np.int64(0).__reduce__()[0]

# Everything that building dicts, arrays, ints and strings takes, and nothing that calls anything else.
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
    """Keep the garbage collector from running: a day's pickles are a million containers and no cycle among them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
                f"has no use for; nothing was run. Get the file from its source again, or leave it alone"
            ) from None
        return found


def load_pickle(path: AnyPath) -> Any:
    """Return what a pickle of dicts, defaultdicts, arrays of numbers, ints and strings holds, arrays as `StoredArray`.

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
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "id_cnt.pkl"
        >>> _ = path.write_bytes(pickle.dumps({"user_id": 3}))
        >>> load_pickle(path)
        {'user_id': 3}
    """
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
