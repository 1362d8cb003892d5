"""Simulate a multi-stage recommender and write what it did in RecFlow's layout, with the ground truth beside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from recsys_topk.datamodules.folders import whole_folder
from recsys_topk.datamodules.recflow.days import midnight, parse_day
from recsys_topk.datamodules.recflow.layout import ORDERED_STAGES, SLOTS, STAGES
from recsys_topk.datamodules.simulator.funnel import PROPOSALS, SHOWN, Proposer, run_funnel
from recsys_topk.datamodules.simulator.ground_truth import GroundTruth, reference_recalls
from recsys_topk.datamodules.simulator.world import DAY_MS, World, WorldConfig

__all__ = ["GroundTruth", "WorldConfig", "reference_recalls", "simulate"]

Array = npt.NDArray[Any]

_HISTORY: Final = 50
_CHUNK: Final = 2048
_FIRST_REQUEST: Final = 10_000_000
_FILE_STAGES: Final = ("realshow", *STAGES)


@dataclass
class _Views:
    """The last views of every user, oldest first, newest last, -1 or 0 where there are fewer."""

    item: Array
    time_ms: Array
    playing_ms: Array
    request_id: Array

    @classmethod
    def none(cls, users: int) -> _Views:
        shape = (users, _HISTORY)
        return cls(
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int64),
        )

    def of(self, users: Array) -> _Views:
        return _Views(self.item[users], self.time_ms[users], self.playing_ms[users], self.request_id[users])

    def append(self, users: Array, viewed: Array, new: _Views) -> None:
        """Append the viewed columns of `new` to the rows of `users`, which must differ."""
        order = np.argsort(~viewed, axis=1, kind="stable")
        shift = np.arange(_HISTORY) + viewed.sum(1)[:, None]
        for name in ("item", "time_ms", "playing_ms", "request_id"):
            added = np.take_along_axis(getattr(new, name), order, 1)
            column = getattr(self, name)
            column[users] = np.take_along_axis(np.concatenate([column[users], added], axis=1), shift, 1)


def simulate(out: str | Path, config: WorldConfig, progress: Callable[[str], None] | None = None) -> Path:
    """Write a simulated world to `out` in RecFlow's layout.

    Besides `data/`, laid out as RecFlow's, there is `ground_truth.npz`, from which `GroundTruth` gives the utility of
    any item to any request. The folder appears when everything is written. Memory is bounded by the users' histories
    and one day; time is about linear in the requests.

    Args:
        out: Folder to make; it must not exist, or be empty.
        config: Size and character of the world.
        progress: Called with each day when it is written.

    Returns:
        `out`, as a path.

    Example:
        >>> import tempfile
        >>> config = WorldConfig(users=20, items=200, days=1, requests=30)
        >>> root = simulate(Path(tempfile.mkdtemp()) / "world", config)
        >>> sorted(path.name for path in (root / "data").iterdir())
        ['all_stage', 'others', 'request_id_dict', 'seq_effective_50_dict']
    """
    target = Path(out).expanduser()
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            raise FileExistsError(f"{target} exists and is not empty; choose another folder or remove it")
        target.rmdir()
    world = World.make(config)
    with whole_folder(target) as folder:
        for name in ("all_stage", "others", "request_id_dict", "seq_effective_50_dict"):
            (folder / "data" / name).mkdir(parents=True)
        _dump(folder / "data" / "others" / "id_cnt.pkl", world.counts)
        views = _first_views(world)
        logs = []
        for number, day in enumerate(config.day_names):
            logs.append(_write_day(folder / "data", world, views, number, day))
            if progress is not None:
                progress(day)
        truth = GroundTruth(world, *(np.concatenate(column) for column in zip(*logs, strict=True)))
        truth.save(folder)
    return target


def _dump(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=4)


def _slices(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK))


def _first_views(world: World) -> _Views:
    """Return histories from before the first day: up to 50 views of the last two days, most of what users like."""
    rng = np.random.default_rng([world.config.seed, 1])
    start = midnight(parse_day(world.config.start))
    proposer = Proposer(world, start - 2 * 86400)
    views = _Views.none(world.config.users)
    for part in _slices(world.config.users):
        users = np.arange(part.start, part.stop)
        now = np.full(users.size, start * 1000)
        items, valid = proposer.propose(rng, users, now, PROPOSALS)
        liking = np.where(valid, world.utility(users, now, items) + rng.gumbel(size=items.shape) * 0.7, -np.inf)
        best = np.argsort(-liking, axis=1)[:, :_HISTORY]
        wanted = rng.integers(-3, _HISTORY + 1, users.size)
        chosen = np.take_along_axis(valid, best, 1) & (np.arange(_HISTORY) < wanted[:, None])
        mixed = rng.permuted(np.where(chosen, np.take_along_axis(items, best, 1), -1), axis=1)
        times = np.sort(start * 1000 - rng.integers(1, 2 * DAY_MS, mixed.shape), axis=1)
        playing = rng.integers(1000, 60_000, mixed.shape)
        new = _Views(mixed.astype(np.int32), times, playing.astype(np.int32), np.zeros_like(times))
        views.append(users, mixed >= 0, new)
    return views


def _write_day(folder: Path, world: World, views: _Views, number: int, day: str) -> tuple[Array, Array, Array]:
    """Simulate and write one day; return its request ids, users and times."""
    config = world.config
    rng = np.random.default_rng([config.seed, 2, number])
    start_s = midnight(parse_day(day))
    proposer = Proposer(world, start_s)
    users = np.minimum(np.searchsorted(world.activity, rng.random(config.requests)), config.users - 1)
    # Few requests at night, most in the evening.
    time_ms = start_s * 1000 + np.sort((DAY_MS * rng.beta(2.5, 1.6, config.requests)).astype(np.int64))
    request_id = _FIRST_REQUEST + number * config.requests + np.arange(config.requests)
    groups = {stage: np.full((config.requests, SLOTS), -1, dtype=np.int64) for stage in _FILE_STAGES}
    viewed = np.zeros((config.requests, SHOWN), dtype=bool)
    playing = np.zeros((config.requests, SHOWN), dtype=np.int64)
    seen = _Views.none(config.requests)
    for rows in _waves(users):
        before = views.of(users[rows])
        outcome = run_funnel(world, proposer, rng, users[rows], time_ms[rows], before.item)
        for stage, items in outcome.groups.items():
            groups[stage][rows] = items
        viewed[rows], playing[rows] = outcome.viewed, outcome.playing_ms
        for name in ("item", "time_ms", "playing_ms", "request_id"):
            getattr(seen, name)[rows] = getattr(before, name)
        shape = outcome.viewed.shape
        shown = groups["realshow"][rows, :SHOWN].astype(np.int32)
        when = np.broadcast_to(time_ms[rows, None], shape)
        views.append(
            users[rows],
            outcome.viewed,
            _Views(shown, when, playing[rows], np.broadcast_to(request_id[rows, None], shape)),
        )
    _dump(folder / "request_id_dict" / f"{day}.pkl", _stage_dict(world, request_id, groups, viewed))
    _dump(folder / "seq_effective_50_dict" / f"{day}.pkl", _history_dict(world, request_id, seen))
    _write_all_stage(
        folder / "all_stage" / f"{day}.feather", world, (request_id, users, time_ms), groups, viewed, playing
    )
    return request_id, users, time_ms


def _waves(users: Array) -> Iterator[Array]:
    """Give the rows of the day's first requests of all users, then of their second ones, ..., in chunks.

    Within a wave no user occurs twice, so that all its requests can be simulated at once, each with a history that
    holds everything viewed before.
    """
    order = np.argsort(users, kind="stable")
    ordered = users[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]]
    place = np.arange(users.size)
    nth = np.empty(users.size, dtype=np.int64)
    nth[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    by_wave = np.argsort(nth, kind="stable")
    for wave in np.split(by_wave, np.flatnonzero(np.diff(nth[by_wave])) + 1):
        for part in _slices(wave.size):
            yield wave[part]


def _item_columns(world: World, items: Array) -> dict[str, Array]:
    return {
        "video_id": items,
        "author_id": world.author[items],
        "category_level_two": world.category[items],
        "category_level_one": world.category_one[world.category[items]],
        "upload_type": world.upload_type[items],
        "upload_timestamp": world.upload_s[items],
        "duration": world.duration_ms[items],
    }


def _stage_dict(world: World, request_id: Array, groups: dict[str, Array], viewed: Array) -> dict[int, Any]:
    names = ("video_id", "author_id", "duration", "category_level_two", "upload_type", "upload_timestamp")
    stages: dict[int, dict[str, Array]] = {int(i): {} for i in request_id}
    for stage, items in groups.items():
        count = (items >= 0).sum(1).tolist()
        for part in _slices(request_id.size):
            columns = _item_columns(world, np.maximum(items[part], 0))
            rows = np.zeros((*items[part].shape, 8), dtype=np.int64)
            for i, name in enumerate(names):
                rows[..., i] = columns[name]
            rows[..., 6] = columns["category_level_one"]
            if stage == "realshow":
                rows[:, :SHOWN, 7] = viewed[part]
            for request, array, n in zip(request_id[part].tolist(), rows, count[part], strict=True):
                # Both ways of having nothing occur in RecFlow: an empty array and no entry.
                if n or request % 2:
                    stages[request][stage] = array[:n]
    return stages


def _history_dict(world: World, request_id: Array, seen: _Views) -> dict[int, Array]:
    histories: dict[int, Array] = {}
    for part in _slices(request_id.size):
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
    world: World,
    requests: tuple[Array, Array, Array],
    groups: dict[str, Array],
    viewed: Array,
    playing: Array,
) -> None:
    """Write one row per (request, video), with a flag for each stage it stood in."""
    import pyarrow as pa

    request_id, users, time_ms = requests
    writer = None
    with pa.OSFile(str(path), "wb") as file:
        for part in _slices(request_id.size):
            stacked = np.stack([groups[stage][part] for stage in _FILE_STAGES], axis=1)
            row, stage, slot = np.nonzero(stacked >= 0)
            keys, inverse = np.unique(row * world.config.items + stacked[row, stage, slot], return_inverse=True)
            row_of, items = np.divmod(keys, world.config.items)
            owner = part.start + row_of
            profile = world.profile[users[owner]]
            columns: dict[str, Array] = {
                "request_id": request_id[owner],
                "user_id": users[owner],
                "request_timestamp": time_ms[owner],
                **{name: profile[:, i] for i, name in enumerate(("device_id", "gender", "age", "province"))},
                **_item_columns(world, items),
            }
            for number, name in enumerate(_FILE_STAGES):
                at = stage == number
                columns[name] = np.zeros(keys.size, dtype=np.int64)
                columns[name][inverse[at]] = 1
                if name in ORDERED_STAGES:
                    position = np.zeros(keys.size, dtype=np.int64)
                    position[inverse[at]] = slot[at] + 1
                    columns[ORDERED_STAGES[name]] = position
            shown = stage == _FILE_STAGES.index("realshow")
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
