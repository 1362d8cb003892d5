"""RecFlow's files as they come: where they are, how many ids there are, and one day turned into columns."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.days import clock_ids
from recsys_topk.datamodules.layout import (
    BEST_LABEL,
    ITEM_IDS,
    LAYOUTS,
    ORDERED_STAGES,
    REQUEST_IDS,
    SLOTS,
    STAGES,
    UNSHIFTED,
    largest_id,
)
from recsys_topk.datamodules.pickles import FormatError, load_pickle
from recsys_topk.datamodules.rows import VARIANT, intern_columns

Array = npt.NDArray[Any]

_SAMPLE: Final = ("request_id", "user_id", "request_timestamp", "device_id", "age", "gender", "province")
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
_CHUNK: Final = 1024
"""Requests whose arrays are joined at a time; small enough for the cache, and bounds the memory."""

_WORST_POSITION: Final = BEST_LABEL - 1 - max(layout.positive_above for layout in LAYOUTS.values())


@dataclass(frozen=True)
class DayColumns:
    """One day as columns, in the ids of the embedding tables.

    Attributes:
        requests: `request_id` (n,), the request features (n,), one (n, SLOTS) column a stage with row numbers of
            `items` (-1 = nothing), one (n, SLOTS) column of positions an ordered stage, `history` (n, W) with row
            numbers of `views`, oldest first, and `history_length` (n,).
        items: The day's catalogue, sorted by `item_id`: the item features and `count`, in how many slots it stands.
        views: The distinct rows of the histories.
    """

    requests: Mapping[str, Array]
    items: Mapping[str, Array]
    views: Mapping[str, Array]


class RecFlowFiles:
    """The folder of a RecFlow data set.

    Args:
        root: The folder that holds `all_stage`, or the one above it (then `data/all_stage`).
    """

    def __init__(self, root: str | Path) -> None:
        given = Path(root).expanduser()
        self.folder = next((f for f in (given / "data", given) if (f / "all_stage").is_dir()), given)
        if not (self.folder / "all_stage").is_dir():
            raise FileNotFoundError(
                f"{given} holds no RecFlow data: there is neither all_stage/ nor data/all_stage/ in it; point root at "
                f"the folder with all_stage, request_id_dict, seq_effective_50_dict and others, or leave it out to "
                f"use the simulated world"
            )

    @cached_property
    def days(self) -> tuple[str, ...]:
        """The days of `all_stage`, in order."""
        stems = (path.stem for path in (self.folder / "all_stage").glob("*.feather"))
        found = tuple(sorted(stem for stem in stems if re.fullmatch(r"\d{4}-\d{2}-\d{2}", stem)))
        if not found:
            raise FileNotFoundError(f"{self.folder / 'all_stage'} holds no file named YYYY-MM-DD.feather")
        return found

    @cached_property
    def counts(self) -> dict[str, int]:
        """Distinct ids by field, from `others/id_cnt.pkl`."""
        return read_counts(self.folder / "others" / "id_cnt.pkl")

    def paths(self, day: str) -> dict[str, Path]:
        """Return the three files of a day, or raise naming the ones that are missing."""
        files = {
            "all_stage": self.folder / "all_stage" / f"{day}.feather",
            "request_id_dict": self.folder / "request_id_dict" / f"{day}.pkl",
            "seq_effective_50_dict": self.folder / "seq_effective_50_dict" / f"{day}.pkl",
        }
        missing = [str(path) for path in files.values() if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"day {day} is not complete: {' and '.join(missing)} missing; each day has 3 files")
        return files

    def read(self, day: str) -> DayColumns:
        """Read one day."""
        return read_day(self.paths(day), self.counts)


def read_counts(path: Path) -> dict[str, int]:
    """Return `id_cnt.pkl` under the names of the features, whichever spelling the file uses.

    The item is called photo_id or video_id (photo_id wins, as in the reference), and keys may have spaces around them.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; it holds the number of ids of every field")
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} must hold a dict from field to number of ids, got {type(content).__name__}")
    stripped = {str(key).strip(): value for key, value in content.items()}
    if "photo_id" in stripped:
        stripped["video_id"] = stripped["photo_id"]
    missing = [field for field in (*REQUEST_IDS, *ITEM_IDS) if field not in stripped]
    if missing:
        raise FormatError(f"{path} has no count for {', '.join(missing)}; it has {', '.join(sorted(stripped))}")
    return {field: int(stripped[field]) for field in (*REQUEST_IDS, *ITEM_IDS)}


def read_day(paths: Mapping[str, Path], counts: Mapping[str, int]) -> DayColumns:
    """Turn the three files of a day into columns.

    Args:
        paths: The files, by folder name.
        counts: Distinct ids by field.

    Raises:
        FormatError: A file is damaged, a request is missing in one of them, or an id is beyond its count. The message
            names the file and the request.
    """
    table, positions = _read_all_stage(paths["all_stage"])
    request_id = table["request_id"]
    for field in REQUEST_IDS:
        _check_ids(table[field], field, counts, request_id, paths["all_stage"])
    requests: dict[str, Array] = {"request_id": request_id}
    clock = clock_ids(table["request_timestamp"] // 1000)
    requests.update(zip(("weekday", "hour", "minute"), clock.T, strict=True))
    for field in REQUEST_IDS:
        requests[field] = _narrow(table[field] + 1, counts[field] + 1)
    items = _read_stages(paths, request_id, positions, counts, requests)
    views = _read_histories(paths["seq_effective_50_dict"], request_id, counts, requests)
    return DayColumns(requests, items, views)


def _read_all_stage(path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the samples (distinct rows of the request columns, in file order) and (request, video, position) rows."""
    import pyarrow as pa
    from pyarrow import feather

    try:
        with pa.memory_map(str(path)) as file:
            present = set(pa.ipc.open_file(file).schema.names)
        missing = [name for name in (*_SAMPLE, "video_id") if name not in present]
        if missing:
            raise FormatError(f"{path} has no column {', '.join(missing)}; it has {', '.join(sorted(present))}")
        wanted = {*_SAMPLE, "video_id", *ORDERED_STAGES, *ORDERED_STAGES.values()}
        table = feather.read_table(path, columns=sorted(wanted & present), memory_map=True)
        sample = {name: _integers(table, name, path) for name in _SAMPLE}
        ordered = {}
        for stage, index in ORDERED_STAGES.items():
            if stage in present and index in present:
                rows = np.flatnonzero(_integers(table, stage, path) == 1)
                columns = (sample["request_id"], _integers(table, "video_id", path), _integers(table, index, path))
                ordered[stage] = np.stack([column[rows] for column in columns], axis=1)
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{path} is not a whole feather file ({error}); get it again") from error
    if not len(sample["request_id"]):
        raise FormatError(f"{path} has no rows")
    starts = np.zeros(len(sample["request_id"]), dtype=bool)
    starts[0] = True
    for column in sample.values():
        starts[1:] |= column[1:] != column[:-1]
    rows = np.flatnonzero(starts)
    if np.unique(sample["request_id"][rows]).size < rows.size:
        stacked = np.stack([column[rows] for column in sample.values()], axis=1)
        rows = rows[np.sort(np.unique(stacked, axis=0, return_index=True)[1])]
    return {name: column[rows] for name, column in sample.items()}, ordered


def _integers(table: Any, name: str, path: Path) -> Array:
    import pyarrow as pa

    column = table[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise FormatError(
            f"{path}: column {name} must hold integers without gaps, it is {column.type} with {column.null_count} nulls"
        )
    return np.asarray(column.to_numpy(), dtype=np.int64)


def _narrow(values: Array, largest: int) -> Array:
    """Return `values` in the smallest unsigned type that holds `largest`."""
    return values.astype(np.min_scalar_type(largest))


def _row_numbers(rows: int) -> np.dtype[Any]:
    """Return the smallest signed type for row numbers of a table and -1."""
    return np.min_scalar_type(-max(rows, 1))


def _check_ids(values: Array, field: str, counts: Mapping[str, int], owner: Array, path: Path) -> None:
    largest = largest_id(field, counts[field])
    if values.size and (values.min() < 0 or values.max() > largest):
        at = int(np.flatnonzero((values < 0) | (values > largest))[0])
        raise FormatError(
            f"{path}, request {int(owner[at])}: {field} is {int(values[at])}, and others/id_cnt.pkl admits "
            f"0..{largest} (count {counts[field]}); the files do not belong together"
        )


def _look_up(path: Path, request_id: Array) -> list[Any]:
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


def _joined(arrays: Sequence[Any], width: int, owner: Array, path: Path) -> Array:
    """Join (n, width) integer arrays along rows, or raise naming the first that is something else."""
    if not arrays:
        return np.empty((0, width), dtype=np.int64)
    if set(map(type, arrays)) == {np.ndarray}:
        with contextlib.suppress(ValueError):  # shapes that do not fit together: the loop below names the request
            rows = np.concatenate(arrays)
            if rows.ndim == 2 and rows.shape[1] == width and rows.dtype.kind in "iu":
                return rows
    for array, request in zip(arrays, owner, strict=True):
        found = (array.ndim, *array.shape[-1:], array.dtype.kind) if isinstance(array, np.ndarray) else ()
        if found not in ((2, width, "i"), (2, width, "u")):
            given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise FormatError(f"{path}, request {int(request)}: expected an integer array (n, {width}), got {given}")
    raise AssertionError("one of the arrays was refused")


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK))


def _ids(rows: Array, columns: Mapping[str, int], counts: Mapping[str, int], owner: Array, path: Path) -> Array:
    """Return the id columns of `rows`, checked, as (5, n) int32 in the order of ITEM_IDS."""
    out = np.empty((len(ITEM_IDS), len(rows)), dtype=np.int32)
    for i, field in enumerate(ITEM_IDS):
        values = np.ascontiguousarray(rows[:, columns[field]])
        _check_ids(values, field, counts, owner, path)
        out[i] = values
    return out


def _id_columns(distinct: Array, counts: Mapping[str, int]) -> dict[str, Array]:
    """Return columns of raw ids as ids of the tables: shifted by one unless the field is stored unshifted."""
    return {
        field: _narrow(distinct[i] + (field not in UNSHIFTED), counts[field] + 1) for i, field in enumerate(ITEM_IDS)
    }


def _read_stages(
    paths: Mapping[str, Path],
    request_id: Array,
    positions: Mapping[str, Array],
    counts: Mapping[str, int],
    requests: dict[str, Array],
) -> dict[str, Array]:
    """Add the stage and position columns to `requests` and return the catalogue."""
    path = paths["request_id_dict"]
    entries = _look_up(path, request_id)
    for entry, request in zip(entries, request_id, strict=True):
        if not isinstance(entry, dict):
            raise FormatError(f"{path}, request {int(request)}: expected a dict from stage to array, got {entry!r:.60}")
    rows: list[Array] = []
    slots: dict[str, list[Array]] = {stage: [] for stage in STAGES}
    for chunk in _chunks(len(entries)):
        for stage in STAGES:
            sizes, raw = _stage_rows(entries[chunk], stage, request_id[chunk], path)
            owner = np.repeat(request_id[chunk], sizes)
            minute = (raw[:, _UPLOAD_COLUMN] // 60).astype(np.int32)
            rows.append(np.vstack([_ids(raw, _STAGE_COLUMNS, counts, owner, path), minute]))
            slots[stage].append(sizes)
    del entries
    distinct, number, variant = intern_columns(rows, counts["video_id"])
    cursor = iter(number)
    numbers = _row_numbers(distinct.shape[1])
    for stage in STAGES:
        requests[stage] = np.full((request_id.size, SLOTS), -1, dtype=numbers)
    for at, chunk in enumerate(_chunks(request_id.size)):
        for stage in STAGES:
            taken = np.arange(SLOTS) < slots[stage][at][:, None]
            requests[stage][chunk][taken] = next(cursor)
    for stage, column in ORDERED_STAGES.items():
        requests[column] = _positions(paths["all_stage"], stage, request_id, requests[stage], distinct, positions)
    upload = clock_ids(distinct[-1].astype(np.int64) * 60)
    return {
        "item_id": distinct[0] + VARIANT * variant,
        **_id_columns(distinct, counts),
        **dict(zip(("upload_weekday", "upload_hour", "upload_minute"), upload.T, strict=True)),
        "count": np.bincount(np.concatenate(number), minlength=distinct.shape[1]).astype(np.uint32),
    }


def _stage_rows(entries: Sequence[Any], stage: str, request_id: Array, path: Path) -> tuple[Array, Array]:
    """Return how many items of `stage` each entry has, at most SLOTS, and their rows; none if it lacks the stage."""
    part = [entry.get(stage) for entry in entries]
    sizes = np.array([0 if array is None else len(array) for array in part])
    there = np.flatnonzero(sizes)
    arrays = [part[at] for at in there.tolist()]
    if sizes.max() > SLOTS:
        arrays = [array[:SLOTS] for array in arrays]
        sizes = np.minimum(sizes, SLOTS)
    return sizes, _joined(arrays, 8, request_id[there], path)


def _positions(
    path: Path, stage: str, request_id: Array, column: Array, distinct: Array, positions: Mapping[str, Array]
) -> Array:
    """Return the position of each item of an ordered stage, looked up by (request, video) in `all_stage`."""
    out = np.zeros(column.shape, dtype=np.uint8)
    taken = column >= 0
    if not taken.any():
        return out
    if stage not in positions:
        raise FormatError(f"{path} lacks {stage} or {ORDERED_STAGES[stage]}, and its day has {stage} items")
    known = positions[stage]
    video = distinct[0, column[taken]].astype(np.int64)
    ids, dense = np.unique(np.concatenate([known[:, 0], request_id]), return_inverse=True)
    del ids
    width = int(max(known[:, 1].max(initial=0), video.max(initial=0))) + 1
    keys = dense[: len(known)] * width + known[:, 1]
    order = np.argsort(keys, kind="stable")
    owner = np.broadcast_to(np.arange(request_id.size)[:, None], column.shape)[taken]
    wanted = dense[len(known) :][owner] * width + video
    at = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    found = keys[order[at]] == wanted if len(keys) else np.zeros(wanted.size, dtype=bool)
    if not found.all():
        bad = int(np.flatnonzero(~found)[0])
        raise FormatError(
            f"{path}, request {int(request_id[owner[bad]])}: no row with {stage} = 1 for video {int(video[bad])}, "
            f"which request_id_dict lists there"
        )
    values = known[order[at], 2]
    wrong = np.flatnonzero((values < 0) | (values > _WORST_POSITION))
    if wrong.size:
        raise FormatError(
            f"{path}, request {int(request_id[owner[wrong[0]]])}: {ORDERED_STAGES[stage]} is {int(values[wrong[0]])}; "
            f"positions of {stage} lie in 0..{_WORST_POSITION}"
        )
    out[taken] = values
    return out


def _read_histories(
    path: Path, request_id: Array, counts: Mapping[str, int], requests: dict[str, Array]
) -> dict[str, Array]:
    """Add `history` and `history_length` to `requests` and return the distinct views."""
    entries = _look_up(path, request_id)
    rows: list[Array] = []
    lengths = np.zeros(request_id.size, dtype=np.int64)
    for chunk in _chunks(request_id.size):
        raw = _joined(entries[chunk], 10, request_id[chunk], path)
        sizes = np.fromiter((len(array) for array in entries[chunk]), dtype=np.int64)
        viewed = np.flatnonzero(raw[:, _VIEW_TIME_COLUMN] > 0)
        owner = np.repeat(np.arange(sizes.size), sizes)[viewed]
        lengths[chunk] = np.bincount(owner, minlength=sizes.size)
        rows.append(_ids(raw[viewed], _VIEW_COLUMNS, counts, request_id[chunk][owner], path))
    del entries
    distinct, number, _ = intern_columns(rows, counts["video_id"])
    history = np.full((request_id.size, max(int(lengths.max()), 1)), -1, dtype=_row_numbers(distinct.shape[1]))
    history[np.arange(history.shape[1]) < lengths[:, None]] = np.concatenate(number)
    requests["history"] = history
    requests["history_length"] = _narrow(lengths, history.shape[1])
    return _id_columns(distinct, counts)
