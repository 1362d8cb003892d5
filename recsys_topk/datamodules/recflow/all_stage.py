"""Read `all_stage/<day>.feather`: the requests of a day, and the item positions of the ranking stages."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.recflow.layout import BEST_LABEL, ITEM_IDS, LAYOUTS, ORDERED_STAGES
from recsys_topk.datamodules.recflow.pickles import FormatError
from recsys_topk.datamodules.recflow.rows import row_keys
from recsys_topk.tabular.locations import AnyPath, RemotePath
from recsys_topk.types import Array

_SAMPLE: Final = ("request_id", "user_id", "request_timestamp", "device_id", "age", "gender", "province")
COMPARED: Final = ("request_id", *ITEM_IDS, "upload_timestamp")
"""Columns that are compared with `request_id_dict`."""
_WORST_POSITION: Final = BEST_LABEL - 1 - max(layout.positive_above for layout in LAYOUTS.values())


def read_all_stage(path: AnyPath) -> tuple[dict[str, Array], dict[str, Array], Array | None]:
    """Read a day's feather file, one record batch at a time. Spaces around column names are ignored.

    Args:
        path: The file.

    Returns:
        The samples, which are the distinct rows of the request columns in file order; and (m, 3) rows of request,
        video and position for each ordered stage whose columns are in the file; and the sorted keys (`row_keys`) of
        the rows of request and item features, None if the file does not have all of them.
    """
    samples: dict[str, list[Array]] = {name: [] for name in _SAMPLE}
    ordered: dict[str, list[Array]] = {}
    keys: list[Array] = []
    try:
        with pa.PythonFile(path.open(), mode="r") if isinstance(path, RemotePath) else pa.memory_map(str(path)) as file:
            names = [name.strip() for name in pa.ipc.open_file(file).schema.names]
            missing = [name for name in (*_SAMPLE, "video_id") if name not in names]
            if missing:
                raise FormatError(f"{path} has no column {', '.join(missing)}; it has {', '.join(sorted(names))}")
            wanted = {*_SAMPLE, *COMPARED, *ORDERED_STAGES, *ORDERED_STAGES.values()}
            fields = [i for i, name in enumerate(names) if name in wanted]
            chosen = [names[i] for i in fields]
            if len(set(chosen)) < len(chosen):
                raise FormatError(
                    f"{path} has two columns with the same name (without spaces around it): {', '.join(chosen)}"
                )
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                columns = {name: _integers(batch.column(i), name, path) for i, name in enumerate(chosen)}
                _add_samples(samples, columns)
                _add_positions(ordered, columns)
                if columns.keys() >= set(COMPARED):
                    keys.append(np.unique(row_keys(columns[name] for name in COMPARED)))
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{path} is not a whole feather file ({error}); get it again") from error
    if not sum(map(len, samples["request_id"])):
        raise FormatError(f"{path} has no rows")
    table = {name: np.concatenate(parts) for name, parts in samples.items()}
    if np.unique(table["request_id"]).size < table["request_id"].size:
        # Rows of a request that are not consecutive, or that differ in another column than the video.
        stacked = np.stack(list(table.values()), axis=1)
        rows = np.sort(np.unique(stacked, axis=0, return_index=True)[1])
        table = {name: column[rows] for name, column in table.items()}
    positions = {stage: np.concatenate(parts) for stage, parts in ordered.items()}
    return table, positions, np.unique(np.concatenate(keys)) if keys else None


def _add_samples(samples: dict[str, list[Array]], columns: dict[str, Array]) -> None:
    """Append the rows whose request columns differ from the row before, within one record batch."""
    starts = np.zeros(len(columns["request_id"]), dtype=bool)
    starts[:1] = True
    for name in _SAMPLE:
        starts[1:] |= columns[name][1:] != columns[name][:-1]
    rows = np.flatnonzero(starts)
    for name, parts in samples.items():
        parts.append(columns[name][rows])


def _add_positions(ordered: dict[str, list[Array]], columns: dict[str, Array]) -> None:
    """Append (request, video, position) of the rows with the flag of an ordered stage."""
    for stage, index in ORDERED_STAGES.items():
        if stage in columns and index in columns:
            rows = np.flatnonzero(columns[stage] == 1)
            chosen = [columns[name][rows] for name in ("request_id", "video_id", index)]
            ordered.setdefault(stage, []).append(np.stack(chosen, axis=1))


def _integers(column: Any, name: str, path: AnyPath) -> Array:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise FormatError(
            f"{path}: column {name} must hold integers without gaps, it is {column.type} with {column.null_count} nulls"
        )
    return np.asarray(column.to_numpy(), dtype=np.int64)


def positions_of(
    path: AnyPath, stage: str, request_id: Array, column: Array, video: Array, known: Array | None
) -> Array:
    """Return the position of each item of an ordered stage, looked up by (request, video).

    Args:
        path: The feather file, for error messages.
        stage: The stage.
        request_id: (n,)
        column: (n, SLOTS) row numbers of the catalogue, -1 = no item.
        video: (C,), the video id of each row of the catalogue.
        known: (m, 3) request, video and position, from `read_all_stage`; the first of equal pairs is used. None if
            the file does not have the columns.

    Returns:
        (n, SLOTS) positions, 0 where there is no item.
    """
    out = np.zeros(column.shape, dtype=np.uint8)
    taken = column >= 0
    if not taken.any():
        return out
    if known is None:
        raise FormatError(f"{path} lacks {stage} or {ORDERED_STAGES[stage]}, and its day has {stage} items")
    video = video[column[taken]]
    dense = np.unique(np.concatenate([known[:, 0], request_id]), return_inverse=True)[1]
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
