"""Write simulated requests as files in RecFlow's format."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.recflow.layout import ORDERED_STAGES, STAGES
from recsys_topk.datamodules.simulator.funnel import SHOWN
from recsys_topk.types import Array

HISTORY: Final = 50
"""Number of views in a history."""

FILE_STAGES: Final = ("realshow", *STAGES)
"""The sample groups in the files."""

_CHUNK: Final = 2048


@dataclass
class Views:
    """The last views of every user, oldest first. Users with fewer views have -1 or 0."""

    item: Array
    time_ms: Array
    playing_ms: Array
    request_id: Array

    @classmethod
    def none(cls, users: int) -> Views:
        """Return empty histories."""
        shape = (users, HISTORY)
        return cls(
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int64),
        )

    def of(self, users: Array) -> Views:
        """Return the histories of some users."""
        return Views(self.item[users], self.time_ms[users], self.playing_ms[users], self.request_id[users])

    def append(self, users: Array, viewed: Array, new: Views) -> None:
        """Append the viewed columns of `new` to the rows of `users`; no user may occur twice."""
        order = np.argsort(~viewed, axis=1, kind="stable")
        shift = np.arange(HISTORY) + viewed.sum(1)[:, None]
        for name in ("item", "time_ms", "playing_ms", "request_id"):
            added = np.take_along_axis(getattr(new, name), order, 1)
            column = getattr(self, name)
            column[users] = np.take_along_axis(np.concatenate([column[users], added], axis=1), shift, 1)


def write_counts(folder: Path, counts: Mapping[str, int]) -> None:
    """Create the folders of a data set and write its id counts."""
    for name in ("all_stage", "others", "request_id_dict", "seq_effective_50_dict"):
        (folder / name).mkdir(parents=True)
    _dump(folder / "others" / "id_cnt.pkl", dict(counts))


def write_day(
    folder: Path,
    world: Any,
    day: str,
    requests: tuple[Array, Array, Array],
    groups: dict[str, Array],
    viewed: Array,
    playing: Array,
    seen: Views,
) -> None:
    """Write the three files of a day.

    Args:
        folder: The data folder.
        world: A `World`, or an object with the same columns of items and users.
        day: The date.
        requests: Request ids, users and times in ms, each (n,).
        groups: By stage of `FILE_STAGES`, (n, SLOTS) item ids, -1 = no item.
        viewed: (n, SHOWN), which of the shown items were viewed.
        playing: (n, SHOWN), playing time in ms.
        seen: The users' views before each request, (n, HISTORY).
    """
    request_id = requests[0]
    _dump(folder / "request_id_dict" / f"{day}.pkl", _stage_dict(world, request_id, groups, viewed))
    _dump(folder / "seq_effective_50_dict" / f"{day}.pkl", _history_dict(world, request_id, seen))
    _write_all_stage(folder / "all_stage" / f"{day}.feather", world, requests, groups, viewed, playing)


def _dump(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def slices(rows: int) -> Iterator[slice]:
    """Yield slices of rows of bounded size."""
    return (slice(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK))


def _item_columns(world: Any, items: Array) -> dict[str, Array]:
    return {
        "video_id": items,
        "author_id": world.author[items],
        "category_level_two": world.category[items],
        "category_level_one": world.category_one[world.category[items]],
        "upload_type": world.upload_type[items],
        "upload_timestamp": world.upload_s[items],
        "duration": world.duration_ms[items],
    }


def _stage_dict(world: Any, request_id: Array, groups: dict[str, Array], viewed: Array) -> dict[int, Any]:
    names = ("video_id", "author_id", "duration", "category_level_two", "upload_type", "upload_timestamp")
    stages: dict[int, dict[str, Array]] = {int(i): {} for i in request_id}
    for stage, items in groups.items():
        count = (items >= 0).sum(1).tolist()
        for part in slices(request_id.size):
            columns = _item_columns(world, np.maximum(items[part], 0))
            rows = np.zeros((*items[part].shape, 8), dtype=np.int64)
            for i, name in enumerate(names):
                rows[..., i] = columns[name]
            rows[..., 6] = columns["category_level_one"]
            if stage == "realshow":
                rows[:, :SHOWN, 7] = viewed[part]
            for request, array, n in zip(request_id[part].tolist(), rows, count[part], strict=True):
                # RecFlow has both forms of an empty stage: an empty array and no entry.
                if n or request % 2:
                    stages[request][stage] = array[:n]
    return stages


def _history_dict(world: Any, request_id: Array, seen: Views) -> dict[int, Array]:
    histories: dict[int, Array] = {}
    for part in slices(request_id.size):
        items = seen.item[part]
        rows = np.zeros((*items.shape, 10), dtype=np.int64)
        for i, column in enumerate(_item_columns(world, np.maximum(items, 0)).values()):
            rows[..., i] = column
        rows[..., 7], rows[..., 8], rows[..., 9] = seen.time_ms[part], seen.playing_ms[part], seen.request_id[part]
        rows[items < 0] = 0
        histories.update(zip(request_id[part].tolist(), rows, strict=True))
    return histories


def _write_all_stage(
    path: Path,
    world: Any,
    requests: tuple[Array, Array, Array],
    groups: dict[str, Array],
    viewed: Array,
    playing: Array,
) -> None:
    """Write one row per (request, video), with a flag for each stage that contains the video."""
    request_id, users, time_ms = requests
    writer = None
    with pa.OSFile(str(path), "wb") as file:
        for part in slices(request_id.size):
            stacked = np.stack([groups[stage][part] for stage in FILE_STAGES], axis=1)
            row, stage, slot = np.nonzero(stacked >= 0)
            width = int(stacked.max()) + 1
            keys, inverse = np.unique(row * width + stacked[row, stage, slot], return_inverse=True)
            row_of, items = np.divmod(keys, width)
            owner = part.start + row_of
            profile = world.profile[users[owner]]
            columns: dict[str, Array] = {
                "request_id": request_id[owner],
                "user_id": users[owner],
                "request_timestamp": time_ms[owner],
                **{name: profile[:, i] for i, name in enumerate(("device_id", "gender", "age", "province"))},
                **_item_columns(world, items),
            }
            for number, name in enumerate(FILE_STAGES):
                at = stage == number
                columns[name] = np.zeros(keys.size, dtype=np.int64)
                columns[name][inverse[at]] = 1
                if name in ORDERED_STAGES:
                    position = np.zeros(keys.size, dtype=np.int64)
                    position[inverse[at]] = slot[at] + 1
                    columns[ORDERED_STAGES[name]] = position
            shown = stage == FILE_STAGES.index("realshow")
            for name, values in {"playing_time": playing[part], "effective_view": viewed[part]}.items():
                columns[name] = np.zeros(keys.size, dtype=np.int64)
                columns[name][inverse[shown]] = values[row[shown], slot[shown]]
            columns["long_view"] = ((columns["playing_time"] > 20_000) & (columns["effective_view"] > 0)).astype(
                np.int64
            )
            for name in ("like", "follow", "forward", "comment"):
                columns[name] = np.zeros(keys.size, dtype=np.int64)
            table = pa.table({name: np.asarray(column, dtype=np.int64) for name, column in columns.items()})
            if writer is None:
                writer = pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
            writer.write_table(table)
        if writer is not None:
            writer.close()
