"""Convert raw ids to 64-bit integer keys that are the same on all machines. Needs only numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from recsys_topk.types import Array

_CHUNK: Final = 1 << 16
_LONGEST: Final = 128
"""Longer strings are replaced by a digest, so that one long string does not widen the fixed-width array."""

_DIGITS: Final = 19
_LARGEST: Final = np.uint64(2**63 - 1)
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def mixed(keys: Array, seed: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of integer keys: the output function of the splitmix64 generator.

    Example:
        >>> [int(value) for value in mixed(np.array([0, 1]), 0)]
        [16294208416658607535, 10451216379200822465]
    """
    with np.errstate(over="ignore"):
        z = keys.astype(np.int64, copy=False).view(np.uint64) + np.uint64(seed + 1) * _MULTIPLIER
        z = (z ^ (z >> np.uint64(30))) * _FIRST
        z = (z ^ (z >> np.uint64(27))) * _SECOND
        return np.asarray(z ^ (z >> np.uint64(31)))


def chained(columns: Iterable[Array], seed: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of rows of several integer columns: h = 0, then h = mixed(h xor column) for each column.

    It is the same on every machine and in every engine: with M = 0x9E3779B97F4A7C15 and arithmetic modulo 2^64,
    mixed(x) is z xor (z >> 31) for x + (seed + 1) M, after z = (z xor (z >> 30)) 0xBF58476D1CE4E5B9 and
    z = (z xor (z >> 27)) 0x94D049BB133111EB, where >> shifts in zeros.

    Example:
        >>> [int(value) for value in chained([np.array([7, 7]), np.array([1, 2])], seed=0)]
        [4414019431610648415, 5090977316425868581]
    """
    state: Any = np.uint64(0)
    for column in columns:
        state = mixed((column.astype(np.int64, copy=False).view(np.uint64) ^ state).view(np.int64), seed)
    return np.asarray(state)


class IdKeys(NamedTuple):
    """Ids as integers.

    Attributes:
        keys: int64, in the shape of the ids.
        missing: Boolean, same shape, True where the id is missing; None = no id is missing.
        text: Whether any id is text that is not a plain decimal number.
    """

    keys: npt.NDArray[np.int64]
    missing: Array | None
    text: bool


def id_keys(ids: npt.ArrayLike, missing: npt.ArrayLike | None = None) -> IdKeys:
    """Return ids as int64 keys.

    The key of an integer is the integer itself (unsigned integers above 2^63 wrap around). Text that is a plain decimal
    number between -2^63 and 2^63 has the key of that number, so 42 and "42" are the same id. The key of any other text
    is a 64-bit hash.

    Args:
        ids: Integers or strings; None and NaN among strings are missing.
        missing: Boolean, True where the id is missing.

    Example:
        >>> keys, absent, text = id_keys(["42", None, "x"])
        >>> int(keys[0]), absent.tolist(), text
        (42, [False, True, False], True)
    """
    array = np.asarray(ids)
    absent = None if missing is None else np.asarray(missing, dtype=bool)
    if absent is not None and absent.shape != array.shape:
        raise ValueError(f"missing must have the shape of the ids, {array.shape}, got {absent.shape}")
    if array.dtype.kind in "iub":
        return IdKeys(array.astype(np.int64), absent, False)
    if not array.size:
        return IdKeys(np.zeros(array.shape, dtype=np.int64), absent, False)
    if array.dtype.kind not in "OUS":
        raise TypeError(
            f"ids must be integers or texts, got {array.dtype}; "
            f"turn them into integers, and pass missing= for the ones that are not there"
        )
    flat = array.reshape(-1)
    keys, gaps = np.empty(flat.size, dtype=np.int64), np.zeros(flat.size, dtype=bool)
    text = False
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        texts, gaps[part] = _texts(flat[part])
        keys[part], number = _text_keys(texts)
        text = text or not (number | gaps[part]).all()
    shaped: Array = gaps.reshape(array.shape)
    return IdKeys(keys.reshape(array.shape), shaped if absent is None else shaped | absent, text)


def _texts(ids: Array) -> tuple[Array, Array]:
    """Return a chunk of ids as a fixed-width string array, and a mask of missing ids."""
    if ids.dtype.kind == "S":
        ids = np.char.decode(ids, "utf-8", "surrogateescape")
    gaps = np.zeros(ids.size, dtype=bool)
    if ids.dtype.kind == "O":
        values = ids.tolist()
        kinds = set(map(type, values))
        if not all(issubclass(kind, str) for kind in kinds):
            gaps = np.array([value is None or value != value for value in values], dtype=bool)
            values = ["" if gap else _text(value) for value, gap in zip(values, gaps, strict=True)]
    elif ids.dtype.itemsize > 4 * _LONGEST:
        values = ids.tolist()
    else:
        return ids, gaps
    if max(map(len, values), default=0) > _LONGEST:
        values = [text if len(text) <= _LONGEST else _digest(text) for text in values]
    return np.array(values, dtype=str), gaps


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return str(value)
    raise TypeError(f"ids must be integers or texts, got {value!r} of type {type(value).__name__} among them")


def _digest(text: str) -> str:
    return "\0" + hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _text_keys(texts: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the key of each string, and a mask of the strings that are plain decimal numbers."""
    width = texts.dtype.itemsize // 4
    if not width:
        return mixed(np.zeros(texts.size, dtype=np.int64), 1).view(np.int64), np.zeros(texts.size, dtype=bool)
    codes = np.ascontiguousarray(texts).view(np.uint32).reshape(-1, width).T
    codes = codes.byteswap() if texts.dtype.byteorder == _FOREIGN else codes
    length = np.char.str_len(texts)
    state = np.full(texts.size, 0, dtype=np.uint64)
    value = np.zeros(texts.size, dtype=np.uint64)
    negative = codes[0] == ord("-")
    digits = length - negative
    number = (digits >= 1) & (digits <= _DIGITS)
    with np.errstate(over="ignore"):
        for place, column in enumerate(codes):
            here = place < length
            step = (state ^ column.astype(np.uint64)) * _MULTIPLIER
            state = np.where(here, step ^ (step >> np.uint64(32)), state)
            digit = column.astype(np.int64) - ord("0")
            is_digit = (digit >= 0) & (digit <= 9)
            first = place == negative
            # A number has no leading zero, except 0 itself. "007" and "-0" are text.
            plain = is_digit & ~(first & (digit == 0) & (length > 1))
            number &= plain | ~here | (negative & (place == 0))
            value = np.where(here & is_digit & number, value * np.uint64(10) + digit.astype(np.uint64), value)
        number &= value <= _LARGEST
        signed = np.where(negative, -value.view(np.int64), value.view(np.int64))
        hashed = mixed((state + length.astype(np.uint64)).view(np.int64), 1).view(np.int64)
    return np.where(number, signed, hashed), number


_FOREIGN: Final = ">" if np.dtype("<U1").isnative else "<"
