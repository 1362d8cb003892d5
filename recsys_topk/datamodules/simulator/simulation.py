"""Simulate a multi-stage recommender and write its logs in RecFlow's layout, together with the ground truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from recsys_topk.datamodules.recflow.days import midnight, parse_day
from recsys_topk.datamodules.recflow.layout import SLOTS
from recsys_topk.datamodules.simulator.funnel import SHOWN, Proposer, run_funnel
from recsys_topk.datamodules.simulator.ground_truth import GroundTruth, reference_recalls
from recsys_topk.datamodules.simulator.world import DAY_MS, World, WorldConfig
from recsys_topk.datamodules.simulator.writing import FILE_STAGES, HISTORY, Views, slices, write_counts, write_day
from recsys_topk.files import whole_folder
from recsys_topk.types import Array

__all__ = ["GroundTruth", "WorldConfig", "reference_recalls", "simulate"]


_FIRST_REQUEST: Final = 10_000_000


def simulate(out: str | Path, config: WorldConfig, progress: Callable[[str], None] | None = None) -> Path:
    """Write a simulated world to `out` in RecFlow's layout.

    `data/` has the layout of RecFlow. `GroundTruth` reads `ground_truth.npz` and returns the utility of any item to
    any request. The folder appears when everything is written. Memory is bounded by the users' histories and one day.
    Time is about linear in the number of requests.

    Args:
        out: Folder to create; it must not exist, or be empty.
        config: Size and parameters of the world.
        progress: Called with each day after it is written.

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
    config.check_memory()
    world = World.make(config)
    with whole_folder(target) as folder:
        write_counts(folder / "data", world.counts)
        views = _first_views(world)
        logs = []
        for number, day in enumerate(config.day_names):
            logs.append(_write_day(folder / "data", world, views, number, day))
            if progress is not None:
                progress(day)
        truth = GroundTruth(world, *(np.concatenate(column) for column in zip(*logs, strict=True)))
        truth.save(folder)
    return target


def _first_views(world: World) -> Views:
    """Return histories before the first day: up to 50 views in the last two days, mostly of items that users like."""
    rng = np.random.default_rng([world.config.seed, 1])
    start = midnight(parse_day(world.config.start))
    proposer = Proposer(world, start - 2 * 86400)
    views = Views.none(world.config.users)
    for part in slices(world.config.users):
        users = np.arange(part.start, part.stop)
        now = np.full(users.size, start * 1000)
        items, valid = proposer.propose(rng, users, now)
        liking = np.where(valid, world.utility(users, now, items) + rng.gumbel(size=items.shape) * 0.7, -np.inf)
        best = np.argsort(-liking, axis=1)[:, :HISTORY]
        wanted = rng.integers(-3, HISTORY + 1, users.size)
        chosen = np.take_along_axis(valid, best, 1) & (np.arange(HISTORY) < wanted[:, None])
        mixed = rng.permuted(np.where(chosen, np.take_along_axis(items, best, 1), -1), axis=1)
        times = np.sort(start * 1000 - rng.integers(1, 2 * DAY_MS, mixed.shape), axis=1)
        playing = rng.integers(1000, 60_000, mixed.shape)
        new = Views(mixed.astype(np.int32), times, playing.astype(np.int32), np.zeros_like(times))
        views.append(users, mixed >= 0, new)
    return views


def _write_day(folder: Path, world: World, views: Views, number: int, day: str) -> tuple[Array, Array, Array]:
    """Simulate and write one day; return its request ids, users and times."""
    config = world.config
    rng = np.random.default_rng([config.seed, 2, number])
    start_s = midnight(parse_day(day))
    proposer = Proposer(world, start_s)
    users = np.minimum(np.searchsorted(world.activity, rng.random(config.requests)), config.users - 1)
    # There are few requests at night and most in the evening.
    time_ms = start_s * 1000 + np.sort((DAY_MS * rng.beta(2.5, 1.6, config.requests)).astype(np.int64))
    request_id = _FIRST_REQUEST + number * config.requests + np.arange(config.requests)
    groups = {stage: np.full((config.requests, SLOTS), -1, dtype=np.int64) for stage in FILE_STAGES}
    viewed = np.zeros((config.requests, SHOWN), dtype=bool)
    playing = np.zeros((config.requests, SHOWN), dtype=np.int64)
    seen = Views.none(config.requests)
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
            Views(shown, when, playing[rows], np.broadcast_to(request_id[rows, None], shape)),
        )
    write_day(folder, world, day, (request_id, users, time_ms), groups, viewed, playing, seen)
    return request_id, users, time_ms


def _waves(users: Array) -> Iterator[Array]:
    """Yield the rows of the day's first request of each user, then of the second ones, etc., in chunks.

    No user occurs twice in a wave. All its requests can therefore be simulated at once, and each history holds
    everything viewed before.
    """
    order = np.argsort(users, kind="stable")
    ordered = users[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]]
    place = np.arange(users.size)
    nth = np.empty(users.size, dtype=np.int64)
    nth[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    by_wave = np.argsort(nth, kind="stable")
    for wave in np.split(by_wave, np.flatnonzero(np.diff(nth[by_wave])) + 1):
        for part in slices(wave.size):
            yield wave[part]
