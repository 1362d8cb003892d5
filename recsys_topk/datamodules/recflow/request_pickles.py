"""Read the two pickles of a day, which map requests to arrays, as columns: items of each stage, user histories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from recsys_topk.datamodules.recflow.days import clock_ids
from recsys_topk.datamodules.recflow.layout import CLOCK, ITEM_IDS, SLOTS, STAGES, UNSHIFTED, largest_id
from recsys_topk.datamodules.recflow.pickles import FormatError, StoredArray, load_pickle
from recsys_topk.datamodules.recflow.rows import intern_columns, row_keys
from recsys_topk.tabular.locations import AnyPath
from recsys_topk.tabular.schema import VARIANT
from recsys_topk.types import Array

_STAGE_COLUMNS: Final = {
    "video_id": 0,
    "author_id": 1,
    "category_level_two": 3,
    "category_level_one": 6,
    "upload_type": 4,
}
_UPLOAD_COLUMN: Final = 5
_VIEW_COLUMNS: Final = {
    "video_id": 0,
    "author_id": 1,
    "category_level_two": 2,
    "category_level_one": 3,
    "upload_type": 4,
}
_VIEW_TIME_COLUMN: Final = 7
_KNOWN: Final = {"realshow", *STAGES}
_DIFFERENT: Final = 0.1
"""Share of rows that may differ from `all_stage` before the two files are taken to hold different features."""
_CHUNK: Final = 1024
"""Number of requests whose arrays are joined at once; fits the CPU cache and bounds the memory."""


def read_stages(
    path: AnyPath, request_id: Array, counts: Mapping[str, int], keys: Array | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Read `request_id_dict/<day>.pkl`.

    Args:
        path: The file.
        request_id: (n,), the requests to read.
        counts: Distinct ids by field.
        keys: The keys of the rows of `all_stage` (`read_all_stage`), with which the rows are compared; None = they are
            not.

    Returns:
        One (n, SLOTS) column per stage with row numbers of the catalogue, -1 where there is no item (a stage may be
        missing, empty or short); and the catalogue, sorted by `item_id`.
    """
    entries = _look_up(path, request_id)
    for entry, request in zip(entries, request_id, strict=True):
        if not isinstance(entry, dict):
            raise FormatError(f"{path}, request {int(request)}: expected a dict from stage to array, got {entry!r:.60}")
        if unknown := entry.keys() - _KNOWN:
            raise FormatError(f"{path}, request {int(request)}: unknown stage {min(unknown, key=str)!r:.60}")
    rows: list[Array] = []
    owners: list[Array] = []
    found: list[Array] = []
    slots: dict[str, list[Array]] = {stage: [] for stage in STAGES}
    for chunk in _chunks(len(entries)):
        for stage in STAGES:
            sizes, raw = _stage_rows(entries[chunk], stage, request_id[chunk], path)
            owner = np.repeat(request_id[chunk], sizes)
            minute = (raw[:, _UPLOAD_COLUMN] // 60).astype(np.int32)
            if keys is not None:
                owners.append(owner)
                columns_of_row = (_STAGE_COLUMNS[name] for name in ITEM_IDS)
                found.append(row_keys([owner, *(raw[:, i] for i in columns_of_row), raw[:, _UPLOAD_COLUMN]]))
            rows.append(np.vstack([_ids(raw, _STAGE_COLUMNS, counts, owner, path), minute]))
            slots[stage].append(sizes)
    del entries
    if keys is not None:
        _compare(np.concatenate(found), np.concatenate(owners), keys, path)
    distinct, number, variant = intern_columns(rows, counts["video_id"])
    if not distinct.size:
        raise FormatError(f"{path} has no item in any stage of any request")
    cursor = iter(number)
    numbers = _row_numbers(distinct.shape[1])
    columns = {stage: np.full((request_id.size, SLOTS), -1, dtype=numbers) for stage in STAGES}
    for at, chunk in enumerate(_chunks(request_id.size)):
        for stage in STAGES:
            taken = np.arange(SLOTS) < slots[stage][at][:, None]
            columns[stage][chunk][taken] = next(cursor)
    upload = clock_ids(distinct[-1].astype(np.int64) * 60)
    return columns, {
        "item_id": distinct[0] + VARIANT * variant,
        **_id_columns(distinct, counts),
        **dict(zip((f"upload_{unit}" for unit in CLOCK), upload.T, strict=True)),
        "count": np.bincount(np.concatenate(number), minlength=distinct.shape[1]).astype(np.uint32),
    }


def _compare(found: Array, owner: Array, keys: Array, path: AnyPath) -> None:
    """Raise if rows are not in `all_stage`, unless they are so many that the two files hold different features."""
    other = np.flatnonzero(~np.isin(found, keys))
    if 0 < other.size <= max(_DIFFERENT * found.size, 1):
        raise FormatError(
            f"{path}, request {int(owner[other[0]])}: {other.size} of {found.size} rows differ from all_stage; one "
            f"of the files is damaged; get it again"
        )


def _stage_rows(entries: Sequence[Any], stage: str, request_id: Array, path: AnyPath) -> tuple[Array, Array]:
    """Return the number of items of `stage` in each entry (at most SLOTS, 0 if the stage is missing) and their rows."""
    part = [entry.get(stage) for entry in entries]
    at = [i for i, array in enumerate(part) if array is not None]
    sizes = np.zeros(len(part), dtype=np.int64)
    sizes[at], rows = _joined([part[i] for i in at], 8, request_id[at], path)
    if sizes.max(initial=0) > SLOTS:
        start = np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = rows[np.arange(len(rows)) - start < SLOTS]
    return np.minimum(sizes, SLOTS), rows


def read_histories(
    path: AnyPath, request_id: Array, counts: Mapping[str, int]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Read `seq_effective_50_dict/<day>.pkl`.

    A row of a history is a view if its time is positive. The content of padding rows is ignored.

    Args:
        path: The file.
        request_id: (n,), the requests to read.
        counts: Distinct ids by field.

    Returns:
        `history` (n, W), row numbers of the views, oldest first, then -1; `history_length` (n,); and the distinct
        views.
    """
    entries = _look_up(path, request_id)
    rows: list[Array] = []
    lengths = np.zeros(request_id.size, dtype=np.int64)
    for chunk in _chunks(request_id.size):
        sizes, raw = _joined(entries[chunk], 10, request_id[chunk], path)
        viewed = np.flatnonzero(raw[:, _VIEW_TIME_COLUMN] > 0)
        owner = np.repeat(np.arange(sizes.size), sizes)[viewed]
        lengths[chunk] = np.bincount(owner, minlength=sizes.size)
        rows.append(_ids(raw[viewed], _VIEW_COLUMNS, counts, request_id[chunk][owner], path))
    del entries
    distinct, number, _ = intern_columns(rows, counts["video_id"])
    history = np.full((request_id.size, max(int(lengths.max()), 1)), -1, dtype=_row_numbers(distinct.shape[1]))
    history[np.arange(history.shape[1]) < lengths[:, None]] = np.concatenate(number)
    columns = {"history": history, "history_length": narrow(lengths, history.shape[1])}
    return columns, _id_columns(distinct, counts)


def _look_up(path: AnyPath, request_id: Array) -> list[Any]:
    """Return the entries of a dict pickle for all requests, in order."""
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} must hold a dict from request_id, got {type(content).__name__}")
    ids = request_id.tolist()
    missing = [i for i in ids if i not in content]
    if missing:
        raise FormatError(
            f"{path} lacks request {missing[0]} of all_stage ({len(missing)} of {len(ids)} are missing); every "
            f"request of a day must be in both pickles"
        )
    return [content[i] for i in ids]


def _joined(arrays: Sequence[Any], width: int, owner: Array, path: AnyPath) -> tuple[Array, Array]:
    """Return the lengths of integer arrays (n, width) and all their rows. Raise with the request of a bad array."""
    if not arrays:
        return np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.int64)
    if set(map(type, arrays)) == {StoredArray}:
        _, shapes, dtypes, fortran, data = zip(*[array.state for array in arrays], strict=True)
        dtype = dtypes[0]
        # All arrays have one dtype, C order and the same width, so their bytes can be concatenated.
        one_type = dtypes.count(dtype) == len(dtypes) and dtype.kind in "iu" and not any(fortran)
        if one_type and all(shape[1:] == (width,) for shape in set(shapes)):
            sizes, rows = np.array([shape[0] for shape in shapes]), np.frombuffer(b"".join(data), dtype)
            wrong = np.flatnonzero(sizes * width * dtype.itemsize != np.fromiter(map(len, data), np.int64, len(data)))
            if wrong.size:
                raise FormatError(f"{path}, request {int(owner[wrong[0]])}: an array whose shape and size do not fit")
            return sizes, rows.reshape(-1, width)
    parts = [_checked(array, width, int(request), path) for array, request in zip(arrays, owner, strict=True)]
    return np.array([len(part) for part in parts]), np.concatenate(parts)


def _checked(stored: Any, width: int, request: int, path: AnyPath) -> Array:
    """Return a stored array as (n, width) int64. Raise with the request if it is not valid."""
    given = type(stored).__name__
    if isinstance(stored, StoredArray):
        try:
            array = stored.array()
        except (TypeError, ValueError) as error:
            raise FormatError(f"{path}, request {request}: an array that cannot be read ({error})") from error
        if not array.size:
            return np.empty((0, width), dtype=np.int64)
        if array.ndim == 2 and array.shape[1] == width and array.dtype.kind in "iu":
            return array.astype(np.int64)
        given = f"{array.dtype} {array.shape}"
    raise FormatError(f"{path}, request {request}: expected an integer array (n, {width}), got {given}")


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK))


def _ids(rows: Array, columns: Mapping[str, int], counts: Mapping[str, int], owner: Array, path: AnyPath) -> Array:
    """Check and return the id columns of `rows`, (5, n) int32 in the order of ITEM_IDS."""
    out = np.empty((len(ITEM_IDS), len(rows)), dtype=np.int32)
    for i, field in enumerate(ITEM_IDS):
        values = np.ascontiguousarray(rows[:, columns[field]])
        check_ids(values, field, counts, owner, path)
        out[i] = values
    return out


def _id_columns(distinct: Array, counts: Mapping[str, int]) -> dict[str, Array]:
    """Return columns of raw ids as table ids: plus one, unless the field is stored unchanged."""
    return {
        field: narrow(distinct[i] + (field not in UNSHIFTED), counts[field] + 1) for i, field in enumerate(ITEM_IDS)
    }


def _row_numbers(rows: int) -> np.dtype[Any]:
    """Return the smallest signed dtype for -1 and the row numbers of a table."""
    return np.min_scalar_type(-max(rows, 1))


def narrow(values: Array, largest: int) -> Array:
    """Return `values` in the smallest unsigned dtype that can hold `largest`."""
    return values.astype(np.min_scalar_type(largest))


def check_ids(values: Array, field: str, counts: Mapping[str, int], owner: Array, path: AnyPath) -> None:
    """Raise with file and request if an id of `field` exceeds its count. `owner` is the request of each id."""
    largest = largest_id(field, counts[field])
    if values.size and (values.min() < 0 or values.max() > largest):
        at = int(np.flatnonzero((values < 0) | (values > largest))[0])
        raise FormatError(
            f"{path}, request {int(owner[at])}: {field} is {int(values[at])}, and others/id_cnt.pkl admits "
            f"0..{largest} (count {counts[field]}); the files are from different data sets"
        )
