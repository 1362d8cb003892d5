"""A simulated world: users with changing taste, items with categories, authors and age, and the utility of a view.

Utility of item i to user u at time t:

    taste * (cos(a t) p_u + sin(a t) q_u) . v_i + popularity * appeal_i + freshness * exp(-age_i(t) / 3 days)
    + context * c[time of day, category_i]

v_i is a mix of the vectors of the item's category, of its author, and of the item itself. p_u is a mix of the vectors
of a few categories that the user likes and a random vector. Taste rotates by the angle a per day towards q_u, which is
made in the same way as p_u.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from recsys_topk.datamodules.recflow.days import midnight, parse_day
from recsys_topk.machine import check_budget
from recsys_topk.registry import suggest
from recsys_topk.types import Array

DAY_MS: Final = 24 * 3600 * 1000
_BLOCKS: Final = 6
"""Number of blocks of the day in which the context effect is constant."""


@dataclass(frozen=True)
class WorldConfig:
    """Size and parameters of a simulated world.

    Args:
        users: Number of users; each makes a few requests per day.
        items: Number of items over all days, the catalogue.
        days: Number of days, from `start` on.
        requests: Number of requests per day.
        seed: The same seed gives the same world, byte for byte.
        start: First day.
        dim: Dimension of the taste vectors.
        taste: Weight of taste in the utility.
        popularity: Weight of an item's general appeal.
        freshness: Weight of the freshness of an item.
        context: Weight of the time of day.
        drift: Angle in radians by which taste rotates per day.
        noise: Standard deviation of the noise of the best stage; earlier stages are noisier.
        retrieved: Number of items that retrieval passes on. Pre-ranking keeps two thirds of them, coarse ranking five
            eighths of those; then they are ranked.
        retrieval_noise: Strength of retrieval. A number: the best `retrieved` of `searched` items by taste plus noise
            of this standard deviation (the taste has a standard deviation of about 1). None: a weak retrieval, which
            draws from the user's categories and among popular items: many logged items are worse than random ones.
        searched: Number of uploaded items that a strong retrieval searches, drawn anew for each part of a day.
        author_quality: Share of the variance of an item's appeal that is a property of its author, 0 to 1.
        new_items: Number of items uploaded per day; the others exist before the first day. None = a quarter of all
            items over all days.
    """

    users: int = 1000
    items: int = 3000
    days: int = 7
    requests: int = 5000
    seed: int = 42
    start: str = "2024-01-13"
    dim: int = 8
    taste: float = 1.3
    popularity: float = 0.3
    freshness: float = 0.4
    context: float = 0.3
    drift: float = 0.04
    noise: float = 0.3
    retrieved: int = 96
    retrieval_noise: float | None = None
    searched: int = 4000
    author_quality: float = 0.0
    new_items: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.days <= (dt.date.max - parse_day(self.start)).days:
            raise ValueError(f"a world needs at least 1 days and must end before the year 10000, got {self.days} days")
        least = {
            "users": 1,
            "items": 200,
            "requests": 1,
            "dim": 1,
            "retrieved": 64,
            "searched": self.retrieved,
        }
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"a world needs at least {number} {name}, got {getattr(self, name)}")
        if self.noise < 0 or (self.retrieval_noise or 0) < 0:
            raise ValueError(f"noise must not be negative, got {self.noise} and retrieval_noise {self.retrieval_noise}")
        if not 0 <= self.author_quality <= 1:
            raise ValueError(f"author_quality is a share and must lie in [0, 1], got {self.author_quality}")
        if self.new_items is not None and not 0 <= self.new_items * self.days <= 0.9 * self.items:
            raise ValueError(
                f"new_items must lie between 0 and 90 % of the {self.items} items over {self.days} days, got "
                f"{self.new_items} per day; use more items or fewer new ones"
            )

    def check_memory(self) -> None:
        """Raise if simulating the world needs more memory than the machine has; see `check_budget`."""
        sizes = {
            "users": self.users * (20 * self.dim + 1250),  # two tastes and their making, 50 views
            "items": self.items * (12 * self.dim + 100),
            "requests": self.requests * (24 * self.days + 2000),  # the log, the groups and histories of a day
            "retrieved": 2048 * self.retrieved * (4 * self.dim + 30),  # of the requests that are simulated at once
            "searched": 4096 * min(self.searched, self.items) * (self.retrieval_noise is not None),
        }
        largest = max(sizes, key=lambda name: sizes[name])
        advice = f"use a smaller --data.world.{largest}, now {getattr(self, largest):,}, or --data.world.dim"
        check_budget(sum(sizes.values()), "the simulated world", advice)

    @property
    def day_names(self) -> tuple[str, ...]:
        """The days, as in the file names."""
        first = parse_day(self.start)
        return tuple((first + dt.timedelta(i)).isoformat() for i in range(self.days))


_STRONG: Final = WorldConfig(
    users=300, items=50_000, popularity=1.0, retrieved=200, retrieval_noise=0.3, author_quality=0.6
)
PRESETS: Final[Mapping[str, WorldConfig]] = {
    "small": replace(_STRONG, items=10_000, searched=2000),
    "recflow-like": replace(_STRONG, items=100_000, noise=1.2, seed=43),
    "drift": replace(_STRONG, items=30_000, drift=0.2, new_items=2500, freshness=1.0, seed=44),
}
"""Worlds with a strong retrieval. ``small`` trains in a minute; the recall of the 20 best of 40 logged items of
``recflow-like`` is near the one published for RecFlow; in ``drift`` taste and catalogue change quickly."""


def as_world(config: WorldConfig | Mapping[str, Any]) -> WorldConfig:
    """Return a configuration from a `WorldConfig` or from the dict of a checkpoint."""
    return config if isinstance(config, WorldConfig) else WorldConfig(**config)


def world_options(given: Any) -> Any:
    """Return the options of a world: those of a preset if `given` is its name, with or without changes.

    Example:
        >>> world_options("drift")["drift"]
        0.2
        >>> world_options({"class_path": "drift", "init_args": {"drift": 1.0}})["drift"]
        1.0
    """
    named = given.get("class_path") if isinstance(given, Mapping) else given
    if not isinstance(named, str) or named.lstrip().startswith("{"):  # text of a mapping, which the parser reads
        return given
    if named not in PRESETS:
        raise ValueError(f"unknown world {named!r}; {suggest(named, PRESETS)}worlds: {', '.join(PRESETS)}")
    return {**asdict(PRESETS[named]), **(given.get("init_args", {}) if isinstance(given, Mapping) else {})}


@dataclass(frozen=True)
class World:
    """The latent state of a simulated world; see the module's docstring for the utility.

    Attributes:
        config: The configuration of the world.
        taste: (U, d), taste at the start.
        taste_later: (U, d), the vector that the taste rotates towards.
        profile: (U, 4), device, gender, age and province.
        activity: (U,), cumulative share of the requests.
        vector: (I, d), item vectors.
        appeal: (I,)
        category: (I,), category_level_two; items are sorted by it.
        category_one: (C,), category_level_one of each category.
        category_vector: (C, d)
        author: (I,)
        upload_type: (I,)
        upload_s: (I,), upload time in seconds.
        duration_ms: (I,)
        context_effect: (blocks, C)
    """

    config: WorldConfig
    taste: Array
    taste_later: Array
    profile: Array
    activity: Array
    vector: Array
    appeal: Array
    category: Array
    category_one: Array
    category_vector: Array
    author: Array
    upload_type: Array
    upload_s: Array
    duration_ms: Array
    context_effect: Array

    @classmethod
    def make(cls, config: WorldConfig) -> World:
        """Make a random world."""
        rng = np.random.default_rng([config.seed, 0])
        dim, items, users = config.dim, config.items, config.users
        categories = int(np.clip(items // 50, 8, 120))
        ones = max(4, categories // 4)
        parents = _unit(rng, ones, dim)
        one = np.sort(rng.integers(0, ones, categories))
        category_vector = _mix(parents[one], _unit(rng, categories, dim), 0.6)
        authors = max(8, items // 8)
        home = rng.integers(0, categories, authors)
        author_vector = _mix(category_vector[home], _unit(rng, authors, dim), 0.75)
        author = rng.choice(authors, items, p=_zipf(rng, authors, 0.6))
        category = np.where(rng.random(items) < 0.85, home[author], rng.integers(0, categories, items))
        order = np.argsort(category, kind="stable")
        author, category = author[order], category[order]
        vector = _mix(_mix(category_vector[category], author_vector[author], 0.6), _unit(rng, items, dim), 0.8)
        start = midnight(parse_day(config.start))
        span = config.days * 86400
        new = 0.25 if config.new_items is None else config.new_items * config.days / items
        before = rng.random(items) < 1 - new
        age = np.where(before, -rng.exponential(6 * 86400, items) - 60, rng.random(items) * span)
        return cls(
            config=config,
            taste=_tastes(rng, users, category_vector),
            taste_later=_tastes(rng, users, category_vector),
            profile=np.stack([rng.permutation(users), *(rng.integers(0, n, users) for n in _PROFILE[1:])], axis=1),
            activity=np.cumsum(_zipf(rng, users, 0.4)),
            vector=vector,
            appeal=_appeal(rng, config, author, authors),
            category=category.astype(np.int32),
            # 2 is the padding id of category_level_one, so the simulated ids skip it.
            category_one=(one + (one >= 2)).astype(np.int32),
            category_vector=category_vector,
            author=author.astype(np.int32),
            upload_type=rng.integers(0, 5, items).astype(np.int32),
            upload_s=(start + age).astype(np.int64),
            duration_ms=rng.integers(5_000, 120_000, items),
            context_effect=rng.standard_normal((_BLOCKS, categories)).astype(np.float32),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Number of distinct ids by field, as in `id_cnt.pkl`."""
        return {
            "user_id": self.config.users,
            "device_id": self.config.users,
            **dict(zip(("gender", "age", "province"), _PROFILE[1:], strict=True)),
            "video_id": self.config.items,
            "author_id": int(self.author.max()) + 1,
            "category_level_two": len(self.category_one),
            "category_level_one": int(self.category_one.max()) + 1,
            "upload_type": 5,
        }

    def taste_at(self, users: Array, time_ms: Array) -> Array:
        """Return the taste vectors of `users` at `time_ms`, (n, d)."""
        start = midnight(parse_day(self.config.start)) * 1000
        angle = (self.config.drift * (time_ms - start) / DAY_MS).astype(np.float32)[:, None]
        return np.asarray(np.cos(angle) * self.taste[users] + np.sin(angle) * self.taste_later[users])

    def utility(self, users: Array, time_ms: Array, items: Array) -> Array:
        """Return the utility of `items` (n, m) to `users` (n,) at `time_ms` (n,), float32 (n, m)."""
        weights = self.config
        taste = self.taste_at(users, time_ms)
        value = weights.taste * np.einsum("nd,nmd->nm", taste, self.vector[items])
        value += weights.popularity * self.appeal[items]
        age_days = (time_ms[:, None] / 1000 - self.upload_s[items]) / 86400
        value += weights.freshness * np.exp(-np.maximum(age_days, 0) / 3).astype(np.float32)
        block = (time_ms // 1000 + 8 * 3600) % 86400 * _BLOCKS // 86400
        value += weights.context * self.context_effect[block[:, None], self.category[items]]
        return np.asarray(value, dtype=np.float32)

    def arrays(self) -> dict[str, Array]:
        """Return all arrays by name, for storage."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}

    @classmethod
    def from_arrays(cls, config: WorldConfig, arrays: Mapping[str, Array]) -> World:
        """Rebuild a world from `arrays`."""
        return cls(config=config, **{f.name: arrays[f.name] for f in fields(cls) if f.name != "config"})


def _appeal(rng: np.random.Generator, config: WorldConfig, author: Array, authors: int) -> Array:
    """Return the appeal of the items, of variance 1; their authors contribute the share `author_quality` of it."""
    own, share = rng.standard_normal(config.items), config.author_quality
    quality = np.random.default_rng([config.seed, 9]).standard_normal(authors)
    return np.asarray(np.sqrt(share) * quality[author] + np.sqrt(1 - share) * own, dtype=np.float32)


_PROFILE: Final = (0, 3, 8, 31)
"""Number of devices (0 = one per user), genders, ages and provinces."""


def _unit(rng: np.random.Generator, rows: int, dim: int) -> Array:
    vectors = rng.standard_normal((rows, dim), dtype=np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _mix(base: Array, own: Array, share: float) -> Array:
    """Return unit vectors; `base` contributes the fraction `share` of the squared length."""
    mixed = np.sqrt(np.float32(share)) * base + np.sqrt(np.float32(1 - share)) * own
    return np.asarray(mixed / np.linalg.norm(mixed, axis=1, keepdims=True))


def _tastes(rng: np.random.Generator, users: int, category_vector: Array) -> Array:
    """Return taste vectors of length sqrt(d), made of three liked categories and a random vector per user."""
    dim = category_vector.shape[1]
    liked = category_vector[rng.integers(0, len(category_vector), (users, 3))]
    weight = np.array([1.0, 0.7, 0.5], dtype=np.float32)
    mean = np.einsum("k,nkd->nd", weight, liked)
    mean /= np.linalg.norm(mean, axis=1, keepdims=True)
    return np.asarray(_mix(mean, _unit(rng, users, dim), 0.8) * np.sqrt(np.float32(dim)))


def _zipf(rng: np.random.Generator, n: int, exponent: float) -> Array:
    """Return shares that fall with rank to the power of `exponent`, in random order."""
    weight = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    return rng.permutation(weight / weight.sum())
