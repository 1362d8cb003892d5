"""Vocabularies of RecFlow's id tables: dense as in the files, or built once from the training days."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np

from recsys_topk.datamodules.recflow.cache import DayCache, PreparedDay
from recsys_topk.datamodules.recflow.layout import (
    HISTORY_FEATURES,
    ITEM_IDS,
    REQUEST_IDS,
    padding_id,
    stored_offset,
)
from recsys_topk.files import find_damage, make_once
from recsys_topk.tabular.ids.counter import IdCounter
from recsys_topk.tabular.ids.options import AUTO_DENSE_ROWS, VocabularyOptions
from recsys_topk.tabular.ids.vocabulary import (
    DenseVocabulary,
    HashVocabulary,
    Vocabulary,
    fit_vocabulary,
    load_vocabularies,
    save_vocabularies,
)
from recsys_topk.types import Array

_FORMAT: Final = 1
_CHUNK: Final = 1 << 16


def dense_vocabulary(field: str, count: int) -> DenseVocabulary:
    """Return the dense vocabulary of a field with `count` ids, as in RecFlow's files.

    Example:
        >>> dense_vocabulary("user_id", 100).encode([0, 99]).tolist()
        [1, 100]
        >>> dense_vocabulary("category_level_one", 100).padding
        2
    """
    return DenseVocabulary(count + 2, stored_offset(field), padding_id(field))


def recflow_vocabularies(
    cache: DayCache,
    options: Mapping[str, VocabularyOptions],
    train_days: Callable[[], Sequence[str]],
    announce: Callable[[str], None] = lambda text: None,
) -> dict[str, Vocabulary]:
    """Return the vocabulary of each id table. Those built from training days are stored next to the cache.

    Args:
        cache: The prepared days. Missing training days are prepared if a vocabulary needs them.
        options: Vocabulary options by field.
        train_days: Returns the training days; called only if a vocabulary needs them.
        announce: Called with one line if a vocabulary has to be built.
    """
    made: dict[str, Vocabulary] = {}
    compact: dict[str, VocabularyOptions] = {}
    for field, chosen in options.items():
        dense = dense_vocabulary(field, cache.files.counts[field])
        if chosen.kind == "hash":
            assert chosen.rows is not None
            made[field] = HashVocabulary(chosen.rows, chosen.seed)
        elif chosen.kind == "dense" or (chosen.kind == "auto" and dense.rows <= AUTO_DENSE_ROWS):
            made[field] = dense
        else:
            compact[field] = chosen
    if compact:
        made.update(_compact(cache, compact, tuple(train_days()), announce))
    return {field: made[field] for field in options}


def _compact(
    cache: DayCache, options: Mapping[str, VocabularyOptions], days: Sequence[str], announce: Callable[[str], None]
) -> dict[str, Vocabulary]:
    """Return the vocabularies of the ids of some days. Load them from disk if they were built before."""
    facts = {
        "format": _FORMAT,
        "days": [cache.path(day).name for day in days],  # the names contain fingerprints of the files
        "tables": {field: asdict(chosen) for field, chosen in options.items()},
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    target = cache.folder / f"vocabulary-{digest}"
    if not target.is_dir() or find_damage(target):
        missing = cache.missing(days)
        if missing:
            announce(f"preparing {len(missing)} days of {cache.files.folder} in {cache.folder} (once)")
            cache.prepare(missing)
        announce(f"building the vocabulary of {', '.join(options)} from {len(days)} training days (once)")

    def write(folder: Path) -> None:
        save_vocabularies(folder, {name: _fit(cache, name, own, days) for name, own in options.items()})

    make_once(target, write)
    return load_vocabularies(target)


def _fit(cache: DayCache, field: str, options: VocabularyOptions, days: Sequence[str]) -> Vocabulary:
    """Read one field of all days, one day at a time. Memory holds its distinct ids."""
    counter = IdCounter(counting=options.min_count > 1 or options.kind == "growing")
    for name in days:
        for stored, counts in _stored_ids(cache.open(name), field, counter.counting):
            counter.add(stored.astype(np.int64) - stored_offset(field), counts)
    return fit_vocabulary(replace(options, kind="compact") if options.kind == "auto" else options, counter, name=field)


def _stored_ids(day: PreparedDay, field: str, counting: bool) -> Iterator[tuple[Array, Array | None]]:
    """Yield the ids of a field as stored in the cache, and their number of occurrences if `counting`."""
    if field in REQUEST_IDS:
        yield day.stored_requests[field], None
    if field in ITEM_IDS:
        yield day.catalogue[field], day.catalogue["count"] if counting else None
    if field in HISTORY_FEATURES:
        views = day.stored_views[field]
        yield views, _occurrences(day.stored_requests["history"], views.size) if counting else None


def _occurrences(history: Array, views: int) -> Array:
    """Return how often each view occurs in the histories."""
    total = np.zeros(views, dtype=np.int64)
    for start in range(0, len(history), _CHUNK):
        part = history[start : start + _CHUNK]
        total += np.bincount(part[part >= 0], minlength=views)
    return total
