"""Fit the vocabularies and statistics of features to the training data, one batch of rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from recsys_topk.tabular.features.description import DataPart, Description, RawFeature
from recsys_topk.tabular.features.encoder import FeatureEncoder, State, as_arrow, raw_numbers, squashed
from recsys_topk.tabular.ids.counter import IdCounter
from recsys_topk.tabular.ids.vocabulary import fit_vocabulary
from recsys_topk.tabular.tables.columns import keys_of, lists_of, one_chunk
from recsys_topk.tabular.tables.times import guess_unit
from recsys_topk.types import Array

LONGEST_BAG: Final = 32
"""Maximum number of ids of a bag, unless its size is given."""

_SAMPLE: Final = 1 << 18


class FeatureFitter:
    """Collects the vocabularies and statistics of a `FeatureEncoder`.

    Memory: proportional to the number of distinct ids, plus a sample of each bucketised feature.

    Args:
        description: The features.

    Example:
        >>> fitter = FeatureFitter(Description.from_plain({"items": {"film": "categorical"}}))
        >>> fitter.update("items", {"film": ["a", "b"]})
        >>> fitter.update("items", {"film": ["b", "c"]})
        >>> fitter.finish().vocabularies["film"].describe()
        'compact, 3 ids + 1 for unknown ids'
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self._counters: dict[str, IdCounter] = {}
        self._numbers: dict[tuple[str, str], _Numbers] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._units: dict[tuple[str, str], str] = {}

    def update(self, part: DataPart, rows: Any, times: Array | None = None) -> None:
        """Add rows of the training data.

        Args:
            part: The part of the description.
            rows: Rows in a form that `FeatureEncoder.encode` accepts.
            times: How often each row occurs in the training data, used for `min_count`; None = once.
        """
        table = as_arrow(rows, self.description.columns(part))
        for feature in self.description.part(part):
            columns = [one_chunk(table.column(column)) for column in feature.columns]
            self._add(part, feature, columns, times)

    def count(self, table: str, keys: Array, counts: Array | None = None, *, text: bool = False) -> None:
        """Add ids of a table, as keys (`columns.keys_of`), that do not occur in rows given to `update`.

        Args:
            table: The table.
            keys: int64 keys.
            counts: How often each key occurs; None = once.
            text: Whether any of the ids is text that is not a number.
        """
        counter = self._counters.setdefault(table, IdCounter())
        counter.add(keys, counts)
        counter.text = counter.text or text

    def finish(self) -> FeatureEncoder:
        """Return the encoder."""
        used = {feature.table for part in ("user", "context", "items", "history")
                for feature in self.description.part(part) if feature.table}  # fmt: skip
        vocabularies = {
            name: fit_vocabulary(self.description.table(name), self._counters.get(name, IdCounter()), name=name)
            for name in sorted(used)
        }
        states: dict[str, dict[str, State]] = {}
        for part in ("user", "context", "items"):
            states[part] = {feature.name: self._state(part, feature) for feature in self.description.part(part)}
        states["history"] = {
            feature.name: states["items"][feature.name]
            if feature in self.description.items
            else self._state("history", feature)
            for feature in self.description.history
        }
        return FeatureEncoder(self.description, states, vocabularies)

    def _add(self, part: str, feature: RawFeature, columns: list[Any], times: Array | None) -> None:
        at = (part, feature.name)
        if feature.kind in ("categorical", "bag"):
            column = columns[0]
            if feature.kind == "bag":
                found = lists_of(column, feature.separator, feature.columns[0])
                column = found.values
                times = None if times is None else times[found.row]
                self._sizes[at] = max(self._sizes.get(at, 1), int(found.length.max(initial=1)))
            keys, missing, text = keys_of(column)
            there = ~missing
            self.count(str(feature.table), keys[there], None if times is None else times[there], text=text)
        elif feature.kind == "time":
            if at not in self._units and len(columns[0]) > columns[0].null_count:
                self._units[at] = guess_unit(columns[0])
        else:
            numbers = raw_numbers(feature, columns, self._sizes.get(at))
            self._sizes[at] = numbers.shape[1]
            self._numbers.setdefault(at, _Numbers(feature)).add(numbers)

    def _state(self, part: str, feature: RawFeature) -> State:
        at = (part, feature.name)
        if feature.kind == "categorical":
            return {}
        if feature.kind == "bag":
            return {"size": feature.size or min(self._sizes.get(at, 1), LONGEST_BAG)}
        if feature.kind == "time":
            return {"unit": self._units.get(at, "datetime")}
        numbers = self._numbers.get(at) or _Numbers(feature)
        size = feature.size or self._sizes.get(at, len(feature.columns))
        return {**numbers.state(size), **({"size": size} if feature.kind == "vector" else {})}


class _Numbers:
    """Mean and variance of each column of a stream of numbers, in float64; for buckets, a systematic sample."""

    def __init__(self, feature: RawFeature) -> None:
        self._feature = feature
        self._count: Any = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._missing = False
        self._sample: list[Array] = []
        self._held, self._step, self._seen = 0, 1, 0

    def add(self, numbers: Array) -> None:
        there = ~np.isnan(numbers)
        self._missing |= not there.all()
        if self._feature.transform == "bucketise":
            self._keep(numbers[there])
            return
        values = np.where(there, squashed(self._feature, numbers), 0.0)
        count = there.sum(axis=0)
        mean = values.sum(axis=0) / np.maximum(count, 1)
        squares = np.where(there, (values - mean) ** 2, 0.0).sum(axis=0)
        total = np.maximum(self._count + count, 1)
        apart = mean - self._mean
        self._squares = self._squares + squares + apart**2 * self._count * count / total
        self._mean = self._mean + apart * count / total
        self._count = self._count + count

    def _keep(self, values: Array) -> None:
        """Keep every value; when there are too many, keep every second value, then every fourth, and so on."""
        first = -self._seen % self._step
        self._seen += values.size
        self._sample.append(values[first :: self._step])
        self._held += self._sample[-1].size
        while self._held > _SAMPLE:
            self._sample = [np.concatenate(self._sample)[::2]]
            self._held, self._step = self._sample[0].size, 2 * self._step

    def state(self, size: int) -> State:
        flagged = self._feature.missing if self._feature.missing is not None else self._missing
        if self._feature.transform == "bucketise":
            values = np.concatenate(self._sample) if self._sample else np.zeros(1)
            inner = np.linspace(0, 1, self._feature.buckets + 1)[1:-1]
            return {"edges": np.unique(np.quantile(values, inner)).tolist()}
        deviation = np.sqrt(self._squares / np.maximum(self._count, 1)) * np.ones(size)
        return {
            "mean": (self._mean * np.ones(size)).tolist(),
            "deviation": np.where(deviation > 0, deviation, 1.0).tolist(),
            "missing": bool(flagged),
        }


def fit_features(description: Description, tables: Mapping[DataPart, Any]) -> FeatureEncoder:
    """Return the encoder of tables that fit in memory. Use a `FeatureFitter` for larger tables.

    Args:
        description: The features.
        tables: The training rows of each part, in a form that `FeatureEncoder.encode` accepts.
    """
    fitter = FeatureFitter(description)
    for part, rows in tables.items():
        fitter.update(part, rows)
    return fitter.finish()
