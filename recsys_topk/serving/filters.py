"""Attribute filters: which items of a catalogue have given values of their categorical features and bags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from recsys_topk.registry import suggest
from recsys_topk.tabular.export_tables import ItemTable
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.schema import Schema
from recsys_topk.types import Array


@dataclass(frozen=True)
class Filter:
    """A filter that was looked up in an export.

    Attributes:
        ids: The wanted ids of each feature, as in `ItemTable.ids`. An item needs one of them, for every feature.
        rows: The rows of the items that pass, ascending.
    """

    ids: Mapping[str, list[int]]
    rows: Array


class ItemFilters:
    """Looks up filters such as ``{"genre": ["comedy", "drama"], "language": ["en"]}`` in a catalogue.

    Values of one feature are alternatives, and every feature must match. A value that the export does not know matches
    no item. Bags keep their first `size` values, so an item is not found by a value that was cut off.

    Args:
        encoder: The encoder of the export; None = it has none, and a filter raises.
        schema: The schema of the export.
        items: The catalogue.
    """

    def __init__(self, encoder: FeatureEncoder | None, schema: Schema, items: ItemTable) -> None:
        self._encoder, self._items = encoder, items
        self._columns = schema.id_columns("items")
        self._find = lru_cache(256)(self._look_up)

    def find(self, where: Mapping[str, Sequence[Any]]) -> Filter:
        """Return the filter of attributes; the last ones are remembered."""
        return self._find(tuple((name, tuple(values)) for name, values in where.items()))

    def _look_up(self, where: tuple[tuple[str, tuple[Any, ...]], ...]) -> Filter:
        ids = {name: self._ids(name, values) for name, values in where}
        passing = np.ones(len(self._items.names), dtype=np.bool_)
        for name, wanted in ids.items():
            passing &= np.isin(self._items.ids[:, self._columns[name]], wanted).any(axis=1)
        return Filter(ids, np.flatnonzero(passing))

    def _ids(self, name: str, values: Sequence[Any]) -> list[int]:
        if self._encoder is None:
            raise ValueError("this export has no encoder for features, so items cannot be filtered; leave out where")
        features = {one.name: one for one in self._encoder.description.items if one.kind in ("categorical", "bag")}
        if name not in features:
            raise ValueError(
                f"where has {name!r}, which is not a categorical feature or bag of items; "
                f"{suggest(name, list(features))}items have: {', '.join(features) or 'none'}"
            )
        vocabulary = self._encoder.vocabularies[str(features[name].table)]
        if vocabulary.kind == "hash":
            raise ValueError(
                f"where has {name!r}, whose table is hashed, so that several values share a row and the filter would "
                f"not be exact; train with a compact vocabulary of {name}"
            )
        given = np.array(list(values), dtype=object)
        return [int(row) for row in vocabulary.encode(given)[vocabulary.known(given)]]
