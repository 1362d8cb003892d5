"""The funnel log: what a service was asked, and what every stage did with every item, as Parquet for training."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys_topk.serving.funnel import Passage
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.requests import views_of
from recsys_topk.tabular.export_tables import as_integer
from recsys_topk.tabular.features.description import DataPart, RawFeature
from recsys_topk.tabular.features.guess import guess_roles
from recsys_topk.types import Array

SHOWN: Final = "shown"
DROPPED: Final = "dropped"
OWN: Final = ("request_id", "timestamp", "item_id", "stage", "position", "history")
"""Columns of the log itself. Features with these names are not repeated."""
TIME: Final = pa.timestamp("us", "UTC")


def is_sampled(request: str, share: float) -> bool:
    """Return whether a request is in a sample: by a hash of its id, so every process decides alike.

    Example:
        >>> sum(is_sampled(f"request {n}", 0.05) for n in range(10_000))
        491
    """
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "big") < share * 2.0**64


@dataclass(frozen=True)
class Served:
    """A list that was shown, with the results of all stages."""

    request: str
    user: Any  # a name, or the features with a history
    passages: Sequence[Passage]
    shown: int  # number of items in the answer
    recommender: CascadeRecommender
    time: int = field(default_factory=lambda: time.time_ns() // 1000)  # microseconds


def served(
    request: str, users: Sequence[Any], passages: Sequence[Sequence[Passage]], shown: int, by: CascadeRecommender
) -> list[Served]:
    """Return the lists of an answer. With several of them, their ids are that of the request and /0, /1, ..."""
    names = [request] if len(users) == 1 else [f"{request}/{place}" for place in range(len(users))]
    return [Served(name, user, own, shown, by) for name, user, own in zip(names, users, passages, strict=True)]


class ServedTables:
    """Makes tables of `Served` lists: one row per list, with lists of items in its columns, as `--data lists` reads it.

    All items that the first stage kept are logged, with their scores and the last stage that kept them, and `dropped`
    other items per list, drawn at random from those that it could have kept. `funnel_inclusion` is the probability with
    which an item is in the log of its request, `funnel_share` that with which the request is.

    Args:
        share: Share of the requests that are logged.
        dropped: Number of items per list that the first stage dropped.
    """

    def __init__(self, share: float, dropped: int) -> None:
        self._share, self._dropped = share, dropped
        self._random = np.random.default_rng()
        self._layout = lru_cache(1)(_Layout)
        self._free = np.empty(0, dtype=np.bool_)

    def __call__(self, rows: Sequence[Served]) -> Iterator[Any]:
        """Yield one table for the lists of each export."""
        for recommender, own in groupby(rows, lambda row: row.recommender):
            yield self._table(list(own), self._layout(recommender))

    def _table(self, rows: Sequence[Served], layout: _Layout) -> Any:
        total = len(layout.names)
        drawn = [self._draw(row.passages[0], total) for row in rows]
        parts = [part for row, (more, _) in zip(rows, drawn, strict=True) for part in (row.passages[0].kept, more)]
        chances = np.repeat([one for _, chance in drawn for one in (1.0, chance)], [len(part) for part in parts])
        items, length = np.concatenate(parts), np.array([len(part) for part in parts]).reshape(-1, 2).sum(axis=1)
        keys = np.repeat(np.arange(len(rows)), length) * total + items
        order = np.argsort(keys)
        ordered = keys[order]
        reached = np.zeros(items.size, dtype=np.int64)
        position = np.zeros(items.size, dtype=np.int32)
        scores = np.full((len(layout.stages), items.size), np.nan, dtype=np.float32)
        for number in range(len(layout.stages) if items.size else 0):
            passages = [row.passages[number] for row in rows]
            size = np.array([len(one.rows) for one in passages])
            wanted = np.concatenate([one.rows for one in passages]) + np.repeat(np.arange(len(rows)) * total, size)
            at = order[np.minimum(np.searchsorted(ordered, wanted), keys.size - 1)]
            there = keys[at] == wanted
            rank = np.arange(wanted.size) - np.repeat(np.cumsum(size) - size, size)
            scores[number, at[there]] = np.concatenate([one.scores for one in passages])[there]
            reached[at[rank < passages[0].quota]] = number + 1
            if number == len(layout.stages) - 1:
                shown = rank < np.repeat([row.shown for row in rows], size)
                position[at[shown]] = rank[shown] + 1
                reached[at[shown]] = number + 2
        ends = np.append(0, np.cumsum(length)).astype(np.int32)

        def listed(values: Any) -> Any:
            return pa.ListArray.from_arrays(ends, values)

        columns = {
            "request_id": pa.array([row.request for row in rows], pa.string()),
            "timestamp": pa.array([row.time for row in rows], pa.int64()).cast(TIME),
            **layout.features([row.user for row in rows]),
            "history": layout.histories([row.user for row in rows]),
            "item_id": listed(layout.names.take(pa.array(items))),
            "stage": listed(pa.array([DROPPED, *layout.stages, SHOWN]).take(pa.array(reached))),
            "position": listed(pa.array(position, mask=position == 0)),
            **{
                f"funnel_score_{name}": listed(pa.array(own, pa.float32(), from_pandas=True))
                for name, own in zip(layout.stages, scores, strict=True)
            },
            "funnel_inclusion": listed(pa.array(chances, pa.float64())),
            "funnel_share": pa.array([self._share] * len(rows), pa.float64()),
            "funnel_export": pa.array([layout.recommender.identity] * len(rows), pa.string()),
        }
        return pa.table(columns)

    def _draw(self, first: Passage, total: int) -> tuple[Array, float]:
        """Return some items that the first stage could have kept and did not, and the probability of each of them."""
        out = first.kept if first.excluded is None else np.concatenate([first.kept, first.excluded])
        if first.among is not None:
            left = np.setdiff1d(first.among, out)
            number = min(self._dropped, len(left))
            return self._random.choice(left, number, replace=False), number / max(len(left), 1)
        number = min(self._dropped, total - len(out))
        found = self._random.choice(total, number + len(out), replace=False)
        free = np.ones(total, dtype=np.bool_) if self._free.size != total else self._free
        free[out] = False
        found = found[free[found]][:number]
        free[out], self._free = True, free
        return found, number / max(total - len(out), 1)


class _Layout:
    """The columns of the log of an export.

    Attributes:
        stages: The names of the stages, in order.
        names: The names of the items, a pyarrow array.
    """

    def __init__(self, recommender: CascadeRecommender) -> None:
        self.recommender = recommender
        self.stages = [stage.name for stage in recommender.manifest.stages]
        names = recommender.items.names
        self.names = pa.array(names, pa.int64() if recommender.items.index.are_integers else pa.string())
        encoder = recommender.encoder
        self._kinds: dict[str, tuple[Any, str]] = {}
        parts: tuple[DataPart, ...] = () if encoder is None else ("user", "context")
        for part in parts:
            assert encoder is not None
            for feature in encoder.description.part(part):
                kind = _kind(feature, encoder.states[part].get(feature.name, {}))
                self._kinds |= {column: (kind, feature.separator) for column in feature.columns if column not in OWN}
        self._user = guess_roles(self._kinds, ("user",)).get("user", "user_id")
        self._kinds.setdefault(self._user, (pa.string(), " "))

    def features(self, users: Sequence[Any]) -> dict[str, Any]:
        """Return the columns of raw features; a user who was given by name has only the name."""
        rows = [user if isinstance(user, Mapping) else {self._user: user} for user in users]
        return {name: column_of([row.get(name) for row in rows], *kind) for name, kind in self._kinds.items()}

    def histories(self, users: Sequence[Any]) -> Any:
        """Return the histories as lists of item names, oldest first."""
        kind = pa.list_(self.names.type)
        return pa.array([self._history(user) for user in users], kind)

    def _history(self, user: Any) -> list[Any]:
        if isinstance(user, Mapping):
            given = [_plain(view["item"], self.names.type) for view in views_of(user, 0)]
            return [item for item in given if item is not None]
        users = self.recommender.users
        if users is None or self._rows is None:
            return []
        column, rows = self._rows
        row = int(users.index.rows([user])[0])
        found = rows[users.history[row, : users.history_length[row], column]]
        named: list[Any] = self.recommender.items.names[found[found >= 0]].tolist()
        return named

    @cached_property
    def _rows(self) -> tuple[int, Array] | None:
        """The column of encoded views that names the item, and the catalogue row of each of its ids, -1 = several."""
        schema, ids = self.recommender.manifest.schema, self.recommender.items.ids
        own = schema.id_columns("items")
        for name, at in schema.id_columns("history").items():
            if name in own and at.stop == at.start + 1:
                found, first, count = np.unique(ids[:, own[name].start], return_index=True, return_counts=True)
                if 2 * (count == 1).sum() > len(found):  # the others are rare items, which share a row
                    rows = np.full(max(table.rows for table in schema.tables), -1, dtype=np.int64)
                    rows[found[count == 1]] = first[count == 1]
                    return at.start, rows
        return None


def _kind(feature: RawFeature, state: Mapping[str, Any]) -> Any:
    """Return the type of the raw values of a feature, which must not depend on the values in a file."""
    if feature.kind == "bag":
        return pa.list_(pa.string())
    if feature.kind == "vector" and len(feature.columns) == 1:
        return pa.list_(pa.float64())
    numeric = feature.kind in ("numeric", "vector") or state.get("unit", "datetime") != "datetime"
    return pa.float64() if numeric else pa.string()


def column_of(values: Sequence[Any], kind: Any, separator: str = " ") -> Any:
    """Return raw values as a column of a type; null where a value does not fit."""
    return pa.array([_plain(value, kind, separator) for value in values], kind)


def _plain(value: Any, kind: Any, separator: str = " ") -> Any:
    """Return a raw value in the type of its column; None if it does not fit, as it is missing for the encoder too."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        given = value.split(separator) if isinstance(value, str) else value
        return [_plain(one, kind.value_type) for one in given] if isinstance(given, (list, tuple)) else None
    if pa.types.is_integer(kind):
        return as_integer(value)
    if pa.types.is_floating(kind):
        try:
            return float(value)
        except (TypeError, ValueError):
            return None
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    return str(value).encode("utf-8", "replace").decode()
