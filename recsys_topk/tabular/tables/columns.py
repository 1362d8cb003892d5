"""Convert columns of Arrow tables to numpy arrays: ids as 64-bit keys, numbers and lists, with missing values."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recsys_topk.tabular.ids.keys import id_keys
from recsys_topk.types import Array


class Keys(NamedTuple):
    """Ids as int64 keys (0 where missing), a mask of missing ids, and whether any id is text that is not a number."""

    keys: npt.NDArray[np.int64]
    missing: npt.NDArray[np.bool_]
    text: bool


class ListColumn(NamedTuple):
    """A column of lists.

    Attributes:
        values: The concatenated elements of all lists, a pyarrow array.
        row: The row of each element, ascending.
        place: The position of each element in its list.
        length: The length of each list; 0 where the list is missing.
        missing: Boolean, True where the list is missing.
    """

    values: Any
    row: Array
    place: Array
    length: Array
    missing: Array


def one_chunk(column: Any) -> Any:
    """Return a column of a table as one array; dictionary-encoded values are decoded."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is a string type."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list type."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: Any) -> bool:
    """Return whether an Arrow type is an integer, a float or a boolean."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_whole(kind: Any) -> bool:
    """Return whether all values of an Arrow type are integers that fit into int64."""
    return bool(pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and not pa.types.is_uint64(kind)))


def id_column(column: Any) -> Any:
    """Return ids as a pyarrow array of int64 or text, with nulls where an id is missing.

    Floats without a fraction count as integers, dates and others as text. If an integer is too large for int64, or a
    float has a fraction, all ids are text.

    Example:
        >>> id_column(pa.array([3.0, None, 7.0])).to_pylist(), id_column(pa.array([3.5, 7.0])).to_pylist()
        ([3, None, 7], ['3.5', '7'])
    """
    column = one_chunk(column)
    kind = column.type
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.int8()), pa.int8()
    if pa.types.is_null(kind) or pa.types.is_integer(kind):
        large = pa.types.is_uint64(kind) and (pc.max(column).as_py() or 0) > np.iinfo(np.int64).max
        return column.cast(pa.string() if large else pa.int64())
    if pa.types.is_floating(kind):
        numbers = np.asarray(column.cast(pa.float64()).fill_null(np.nan))
        missing = ~np.isfinite(numbers)
        whole = missing | ((numbers == np.floor(numbers)) & (np.abs(numbers) < 2.0**53))
        if whole.all():
            return pa.array(np.where(missing, 0, numbers).astype(np.int64), mask=missing)
        return pa.array([None if gone else f"{n:.0f}" if one else repr(n)
                         for gone, one, n in zip(missing, whole, numbers.tolist(), strict=True)])  # fmt: skip
    if is_list(kind) or pa.types.is_nested(kind):
        raise ValueError(f"ids must be integers or texts, got {kind}; describe a column of lists as a bag")
    return column.cast(pa.string())


def keys_of(column: Any) -> Keys:
    """Return ids (`id_column`) as int64 keys (`id_keys`).

    Example:
        >>> import pyarrow as pa
        >>> keys, missing, _ = keys_of(pa.array([3.0, None, 7.0]))
        >>> keys.tolist(), missing.tolist()
        ([3, 0, 7], [False, True, False])
    """
    ids = id_column(column)
    missing = np.asarray(ids.is_null())
    if not is_text(ids.type):
        return Keys(np.asarray(ids.fill_null(0)), missing, False)
    coded = ids.dictionary_encode()
    if not len(coded.dictionary):
        return Keys(np.zeros(len(ids), dtype=np.int64), missing, False)
    distinct = id_keys(np.array(coded.dictionary.to_pylist(), dtype=object))
    return Keys(distinct.keys[np.asarray(coded.indices.fill_null(0))] * ~missing, missing, distinct.text)


def numbers_of(column: Any, name: str) -> Array:
    """Return numbers as float64; NaN where they are missing or not finite.

    Raises:
        ValueError: The column contains text that is not a number.
    """
    column = one_chunk(column)
    try:
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        if is_text(column.type):
            column = pc.if_else(pc.equal(column, ""), None, column)
        numbers = np.array(column.cast(pa.float64(), safe=False).fill_null(np.nan), dtype=np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"column {name!r} must have numbers: {' '.join(str(error).split()):.120}; correct it, or if it is a "
            f"feature describe it as categorical"
        ) from error
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def lists_of(column: Any, separator: str, name: str) -> ListColumn:
    """Return the elements of a column of lists, or of text that is split at `separator`."""
    column = one_chunk(column)
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(column)
        column = pc.split_pattern(pc.if_else(pc.equal(column, ""), None, column), separator)
    if pa.types.is_null(column.type):
        column = column.cast(pa.list_(pa.int64()))
    if not is_list(column.type):
        raise ValueError(
            f"column {name!r} must have lists, or text with {separator!r} between its parts, got {column.type}; "
            f"describe it as categorical or numeric"
        )
    missing = np.asarray(column.is_null())
    length = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
    values = pc.list_flatten(column)
    row = np.repeat(np.arange(len(column)), length)
    place = np.arange(row.size) - np.repeat(np.cumsum(length) - length, length)
    return ListColumn(values, row, place, length, missing)


SPLIT_NAMES: Final = {
    "train": 0, "training": 0, "0": 0, "val": 1, "vali": 1, "valid": 1, "validation": 1, "dev": 1, "1": 1, "test": 2,
    "2": 2,
}  # fmt: skip
"""Number of the split for each name that a column or a file name may use."""


def split_numbers(column: Any, name: str) -> npt.NDArray[np.int8]:
    """Return the number of the split of each row, given a column of split names.

    Example:
        >>> import pyarrow as pa
        >>> split_numbers(pa.array(["train", "Test", "dev"]), "part").tolist()
        [0, 2, 1]
    """
    coded = one_chunk(column).cast("string").dictionary_encode()
    names = [str(one).strip().lower() for one in coded.dictionary.to_pylist()]
    unknown = [one for one in names if one not in SPLIT_NAMES]
    if unknown or coded.null_count:
        raise ValueError(
            f"column {name!r} must say train, val or test (or 0, 1, 2) in every row, got "
            f"{repr(unknown[0]) if unknown else 'nothing'}"
        )
    found: npt.NDArray[np.int8] = np.array([SPLIT_NAMES[one] for one in names], dtype=np.int8)[
        np.asarray(coded.indices)
    ]
    return found
