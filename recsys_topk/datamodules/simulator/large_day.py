"""One day as large as the real data, in RecFlow's layout: random lists over many ids, without a learnable pattern."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from recsys_topk.datamodules.recflow.days import midnight, parse_day
from recsys_topk.datamodules.recflow.layout import SLOTS
from recsys_topk.datamodules.simulator.funnel import SHOWN
from recsys_topk.datamodules.simulator.world import DAY_MS
from recsys_topk.datamodules.simulator.writing import HISTORY, Views, write_counts, write_day
from recsys_topk.files import whole_folder
from recsys_topk.tabular.ids.keys import mixed
from recsys_topk.types import Array

_NEW_VIEWS: Final = 2
"""Number of views of a user between two requests."""


@dataclass(frozen=True)
class LargeDay:
    """Size of the day. The defaults are those of RecFlow as far as they are known.

    With the defaults about 10 million different videos occur: 40 in each list, and the views of each user.

    Attributes:
        requests: Number of requests.
        users: Number of users.
        videos: Number of videos in lists and histories, all equally likely (the worst case for look-ups).
        video_ids: Upper bound of the video ids; the videos are spread evenly below it.
        authors: Upper bound of the author ids.
        seed: The same seed gives the same files.
        day: The date.
    """

    requests: int = 250_000
    users: int = 42_000
    videos: int = 27_000_000
    video_ids: int = 75_000_000
    authors: int = 10_000_000
    seed: int = 42
    day: str = "2024-01-13"

    def __post_init__(self) -> None:
        if min(self.requests, self.users, self.authors) < 1 or not 100 <= self.videos <= self.video_ids:
            raise ValueError(
                f"a day needs requests, users, authors, and 100 videos or more within video_ids; got {self}"
            )


class _Column:
    """A column computed from the id: a hash modulo the number of values."""

    def __init__(self, seed: int, values: int, first: int = 0) -> None:
        self.seed, self.values, self.first = seed, values, first

    def __getitem__(self, ids: Array) -> Array:
        return self.first + _hash(np.asarray(ids), self.seed, self.values)


class _Profile:
    def __getitem__(self, users: Array) -> Array:
        columns = [users, *(_hash(users, seed, values) for seed, values in ((7, 3), (8, 8), (9, 31)))]
        return np.stack(columns, axis=-1)


class _Facts:
    """Items and users of the day, in the form that `write_day` needs. Computed from the ids, without memory."""

    def __init__(self, config: LargeDay) -> None:
        self.author = _Column(1, config.authors)
        self.category = _Column(2, 500)
        self.category_one = _Column(3, 60)
        self.upload_type = _Column(4, 5)
        self.upload_s = _Column(5, 30 * 86400, midnight(parse_day(config.day)) - 30 * 86400)
        self.duration_ms = _Column(6, 60_000, 5_000)
        self.profile = _Profile()
        self.counts = {
            "user_id": config.users,
            "device_id": config.users,
            "gender": 3,
            "age": 8,
            "province": 31,
            "video_id": config.video_ids,
            "author_id": config.authors,
            "category_level_two": 500,
            "category_level_one": 60,
            "upload_type": 5,
        }


def simulate_large_day(out: str | Path, config: LargeDay) -> Path:
    """Write one large day to `out`, about 10 kB per request. The data have no learnable pattern.

    Args:
        out: Folder to create; it must not exist.
        config: The size.

    Returns:
        `out`, as a path.

    Example:
        >>> import tempfile
        >>> config = LargeDay(requests=20, users=5, videos=1000, video_ids=5000, authors=50)
        >>> root = simulate_large_day(Path(tempfile.mkdtemp()) / "large", config)
        >>> [path.name for path in (root / "data" / "all_stage").iterdir()]
        ['2024-01-13.feather']
    """
    target = Path(out).expanduser()
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another folder or remove it")
    facts = _Facts(config)
    row = np.arange(config.requests, dtype=np.int64)
    rng = np.random.default_rng(config.seed)
    users = rng.integers(0, config.users, config.requests)
    start_ms = midnight(parse_day(config.day)) * 1000
    time_ms = start_ms + np.sort(rng.integers(0, DAY_MS, config.requests))
    slots = _video(config, row[:, None] * 64 + np.arange(4 * SLOTS), 11).reshape(-1, 4, SLOTS)
    groups = dict(zip(("rank_pos", "rank_neg", "coarse_neg", "prerank_neg"), slots.transpose(1, 0, 2), strict=True))
    groups["rerank_pos"], groups["rerank_neg"] = groups["rank_pos"][:, ::-1], groups["rank_neg"]
    groups["realshow"] = np.where(np.arange(SLOTS) < SHOWN, groups["rerank_pos"], -1)
    viewed = rng.random((config.requests, SHOWN)) < 0.3
    with whole_folder(target) as folder:
        write_counts(folder / "data", facts.counts)
        write_day(
            folder / "data",
            facts,
            config.day,
            (10_000_000 + row, users, time_ms),
            groups,
            viewed,
            np.where(viewed, 20_000, 1_000),
            _histories(config, users, time_ms),
        )
    return target


def _histories(config: LargeDay, users: Array, time_ms: Array) -> Views:
    """Return the last views before each request: a window of one endless sequence of views per user."""
    order = np.argsort(users, kind="stable")
    starts = np.flatnonzero(np.diff(users[order], prepend=-1))
    nth = np.empty(users.size, dtype=np.int64)
    nth[order] = np.arange(users.size) - np.repeat(starts, np.diff(np.r_[starts, users.size]))
    place = users[:, None] * (1 << 20) + _NEW_VIEWS * nth[:, None] + np.arange(HISTORY)
    return Views(
        _video(config, place, 12).astype(np.int32),
        time_ms[:, None] - 60_000 * np.arange(HISTORY, 0, -1),
        np.full(place.shape, 20_000, dtype=np.int32),
        np.zeros(place.shape, dtype=np.int64),
    )


def _video(config: LargeDay, place: Array, seed: int) -> Array:
    """Return a random video id for each place."""
    number = _hash(place, config.seed + seed, config.videos)
    return number * config.video_ids // config.videos


def _hash(ids: Array, seed: int, values: int) -> Array:
    return np.asarray(mixed(np.ascontiguousarray(ids), seed) % np.uint64(values)).astype(np.int64)
