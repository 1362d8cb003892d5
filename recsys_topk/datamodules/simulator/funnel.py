"""Simulate requests in a cascade: retrieval, pre-ranking, coarse ranking, ranking, re-ranking, views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from recsys_topk.datamodules.recflow.layout import SLOTS
from recsys_topk.datamodules.simulator.world import World
from recsys_topk.types import Array

SHOWN: Final = 6
_SHORT_SHARE: Final = 0.08
"""Share of requests that retrieve few items, so that their groups are short or empty."""


@dataclass(frozen=True)
class FunnelResult:
    """The results of the stages and the user's views for n requests.

    Attributes:
        groups: By stage, (n, SLOTS) item ids, best or first drawn item first, -1 = no item.
        viewed: (n, SHOWN) boolean: which of the shown items were effectively viewed.
        playing_ms: (n, SHOWN)
    """

    groups: dict[str, Array]
    viewed: Array
    playing_ms: Array


class Proposer:
    """Retrieval of one day, among the items already uploaded: strong or weak (`WorldConfig.retrieval_noise`).

    Args:
        world: The world.
        time_s: Only items uploaded before this time are retrieved.
    """

    def __init__(self, world: World, time_s: int) -> None:
        self._world = world
        self._uploaded = np.flatnonzero(world.upload_s <= time_s)
        weight = np.exp(0.6 * world.appeal.astype(np.float64)) * (world.upload_s <= time_s)
        self._cumulative = np.r_[0.0, np.cumsum(weight)]
        edges = np.searchsorted(world.category, np.arange(len(world.category_one) + 1))
        self._low, self._high = self._cumulative[edges[:-1]], self._cumulative[edges[1:]]

    def propose(self, rng: np.random.Generator, users: Array, time_ms: Array) -> tuple[Array, Array]:
        """Return (n, `WorldConfig.retrieved`) items, and a mask of their first occurrences in each row."""
        config = self._world.config
        number = config.retrieved
        if config.retrieval_noise is not None:
            searched = rng.choice(self._uploaded, min(config.searched, self._uploaded.size), replace=False)
            match = self._world.taste_at(users, time_ms) @ self._world.vector[searched].T
            match += np.float32(config.retrieval_noise) * rng.standard_normal(match.shape, dtype=np.float32)
            items = searched[np.argpartition(-match, min(number, searched.size) - 1, axis=1)[:, :number]]
            missing = ((0, 0), (0, number - items.shape[1]))  # fewer items are uploaded than wanted
            return np.pad(items, missing), np.pad(np.ones(items.shape, dtype=bool), missing)
        affinity = 2.0 * self._world.taste_at(users, time_ms) @ self._world.category_vector.T
        share = np.exp(affinity - affinity.max(1, keepdims=True), dtype=np.float64) * (self._high > self._low)
        bounds = np.cumsum(share, axis=1)
        liked = int(number * 0.7)
        at = rng.random((users.size, liked)) * bounds[:, -1:]
        # All rows share one sorted axis: row r has the interval [r, r + 1).
        rows = np.arange(users.size)[:, None]
        flat = (bounds / bounds[:, -1:] * (1 - 1e-9) + rows).ravel()
        category = np.searchsorted(flat, (at / bounds[:, -1:] * (1 - 2e-9) + rows).ravel(), side="right")
        category = category.reshape(at.shape) - rows * bounds.shape[1]
        low, high = self._low[category], self._high[category]
        inside = low + rng.random(at.shape) * (high - low)
        anywhere = rng.random((users.size, number - liked)) * self._cumulative[-1]
        places = np.concatenate([inside, anywhere], axis=1)
        found = np.searchsorted(self._cumulative, places.ravel(), side="right").reshape(places.shape) - 1
        items = np.minimum(found, self._cumulative.size - 2)
        return items, _first_in_row(items)


def _first_in_row(items: Array) -> Array:
    order = np.argsort(items, axis=1, kind="stable")
    ordered = np.take_along_axis(items, order, 1)
    repeated = np.zeros(items.shape, dtype=bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    first = np.empty_like(repeated)
    np.put_along_axis(first, order, ~repeated, 1)
    return first


def run_funnel(
    world: World, proposer: Proposer, rng: np.random.Generator, users: Array, time_ms: Array, seen: Array
) -> FunnelResult:
    """Pass requests through the stages. Each stage scores by utility plus its noise and keeps the best items.

    Args:
        world: The world.
        proposer: Retrieval of the day.
        rng: Generator of all noise.
        users: (n,)
        time_ms: (n,)
        seen: (n, L), items that the user viewed recently, which are not retrieved again; -1 = no item.
    """
    items, valid = proposer.propose(rng, users, time_ms)
    for view in seen.T:
        valid &= items != view[:, None]
    short = rng.random(users.size) < _SHORT_SHARE
    retrieved = world.config.retrieved
    limit = np.where(short, rng.integers(1, retrieved // 2, users.size), retrieved)
    valid &= np.cumsum(valid, axis=1) <= limit[:, None]
    utility = world.utility(users, time_ms, items)
    noise = world.config.noise

    def scores(sigma: float) -> Array:
        return np.asarray(utility + np.float32(sigma * noise) * rng.standard_normal(utility.shape, dtype=np.float32))

    count = valid.sum(1)
    kept = (2 * count + 2) // 3
    after_prerank = _best(scores(2.5), valid, kept)
    kept = (5 * kept + 7) // 8
    after_coarse = _best(scores(1.7), after_prerank, kept)
    rank = _order(scores(1.0), after_coarse)
    to_rerank = after_coarse & (rank < 2 * SLOTS)
    rerank = _order(scores(1.2), to_rerank)
    groups = {
        "rank_pos": _take(items, rank, after_coarse & (rank < SLOTS)),
        "rank_neg": _draw(rng, items, after_coarse & (rank >= SLOTS)),
        "coarse_neg": _draw(rng, items, after_prerank & ~after_coarse),
        "prerank_neg": _draw(rng, items, valid & ~after_prerank),
        "rerank_pos": _take(items, rerank, to_rerank & (rerank < SLOTS)),
        "rerank_neg": _take(items, rerank - SLOTS, to_rerank & (rerank >= SLOTS)),
    }
    shown = groups["rerank_pos"][:, :SHOWN]
    groups["realshow"] = np.where(np.arange(SLOTS) < SHOWN, groups["rerank_pos"], -1)
    value = world.utility(users, time_ms, np.maximum(shown, 0))
    viewed = (shown >= 0) & (rng.random(shown.shape) < 1 / (1 + np.exp(1.5 - value)))
    playing = world.duration_ms[np.maximum(shown, 0)] * np.where(viewed, 0.5, 0.1) * rng.random(shown.shape) + 1
    return FunnelResult(groups, viewed, playing.astype(np.int64))


def _order(scores: Array, valid: Array) -> Array:
    """Return the 0-based rank of each item by descending score among the valid ones; invalid items come last."""
    order = np.argsort(np.where(valid, -scores, np.inf), axis=1, kind="stable")
    places = np.empty(order.shape, dtype=np.int64)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), 1)
    return places


def _best(scores: Array, valid: Array, kept: Array) -> Array:
    return np.asarray(valid & (_order(scores, valid) < kept[:, None]))


def _take(items: Array, places: Array, chosen: Array) -> Array:
    """Return the chosen items of each row at the columns `places`, and -1 in the other columns."""
    out = np.full((len(items), SLOTS), -1, dtype=np.int64)
    rows, columns = np.nonzero(chosen)
    out[rows, places[rows, columns]] = items[rows, columns]
    return out


def _draw(rng: np.random.Generator, items: Array, among: Array) -> Array:
    """Return up to SLOTS items of each row, drawn uniformly without replacement."""
    places = _order(rng.random(items.shape, dtype=np.float32), among)
    return _take(items, places, among & (places < SLOTS))
