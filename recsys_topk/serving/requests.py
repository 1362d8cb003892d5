"""Encoded requests for exported models, from raw features and histories or from users of the export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from recsys_topk.tabular.export_tables import ItemTable, UserTable
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.schema import Schema
from recsys_topk.types import Array


@dataclass(frozen=True)
class EncodedRequests:
    """B requests, with the fields of `CascadeBatch`."""

    request: Array  # (B, F_r) integers
    request_values: Array  # (B, V_r) float32
    history: Array  # (B, L, F_h) integers, L >= 1; padding after the last view
    history_length: Array  # (B,) integers
    history_values: Array  # (B, L, V_h) float32
    seen: tuple[Array, ...]  # per request, the rows of the items that the user has seen

    def __len__(self) -> int:
        return len(self.request)

    def inputs(self) -> dict[str, Array]:
        """Return the arrays by the names of the model inputs."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seen"}

    @classmethod
    def of_users(cls, users: UserTable, rows: Array, schema: Schema) -> EncodedRequests:
        """Return the requests of users of an export, with their latest state."""
        made = cls(
            request=users.request[rows],
            request_values=users.request_values[rows],
            history=users.history[rows],
            history_length=users.history_length[rows],
            history_values=users.history_values[rows],
            seen=tuple(users.seen_of(row) for row in rows.tolist()),
        )
        return made._widened(1, schema)

    @classmethod
    def of_rows(
        cls, rows: Sequence[Mapping[str, Any]], encoder: FeatureEncoder, items: ItemTable, schema: Schema, views: int
    ) -> EncodedRequests:
        """Encode raw requests: the features by name, and ``"history"``, the items that the user has seen, oldest first.

        An entry of the history is the name of an item, or a mapping with ``"item"`` and further features of the view.
        Items are looked up in the catalogue. At most `views` are kept, the newest ones.
        """
        user, context = (encoder.encode(part, rows, partial=True) for part in ("user", "context"))
        histories = [views_of(row, number) for number, row in enumerate(rows)]
        found = [items.index.rows([view["item"] for view in history]) for history in histories]
        newest = [
            [(int(row), view) for row, view in zip(numbers, history, strict=True) if row >= 0][-views:]
            for numbers, history in zip(found, histories, strict=True)
        ]
        length = np.array([len(history) for history in newest], dtype=np.int64)
        flat = [pair for history in newest for pair in history]
        ids, values = _encode_views(flat, encoder, items, schema)
        longest = max(1, int(length.max(initial=0)))
        made = cls(
            request=np.concatenate([user.ids, context.ids], axis=1),
            request_values=np.concatenate([user.values, context.values], axis=1),
            history=_padded(ids, length, longest, _padding(schema)),
            history_length=length,
            history_values=_padded(values, length, longest, np.zeros(values.shape[1], dtype=np.float32)),
            seen=tuple(numbers[numbers >= 0] for numbers in found),
        )
        return made._widened(1, schema)

    def completed(self, stored: EncodedRequests, features: Array, histories: Array, schema: Schema) -> EncodedRequests:
        """Return the requests with the stored features, or the stored histories, where a mask, (B,), is True.

        The items that a user has seen are those of both.
        """
        views = max(self.history.shape[1], stored.history.shape[1])
        own, other = self._widened(views, schema).inputs(), stored._widened(views, schema).inputs()
        masks = {name: features if name.startswith("request") else histories for name in own}
        chosen = {
            name: np.where(masks[name].reshape(-1, *[1] * (values.ndim - 1)), other[name], values)
            for name, values in own.items()
        }
        seen = tuple(np.union1d(one, more) for one, more in zip(self.seen, stored.seen, strict=True))
        return EncodedRequests(**chosen, seen=seen)

    def _widened(self, views: int, schema: Schema) -> EncodedRequests:
        """Return the requests with padding up to histories of length `views`. The models require at least 1."""
        missing = views - self.history.shape[1]
        if missing <= 0:
            return self
        padding = np.broadcast_to(_padding(schema), (len(self), missing, len(_padding(schema))))
        width = max((column.stop for column in schema.value_columns("history").values()), default=0)
        values = np.zeros((len(self), missing, width), dtype=np.float32)
        if missing < views:
            padding = np.concatenate([self.history, padding], axis=1)
            values = np.concatenate([self.history_values, values], axis=1)
        return replace(self, history=padding, history_values=values)


def views_of(row: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
    """Return the views of a raw request, each with ``"item"``. The number of the request is for error messages."""
    given = row.get("history")
    if given is None:
        return []
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)):
        raise ValueError(f"the history of request {number} must be a list of items, got {type(given).__name__}")
    views = [view if isinstance(view, Mapping) else {"item": view} for view in given]
    for view in views:
        if "item" not in view:
            raise ValueError(f"a view of request {number} has no 'item', got {sorted(map(str, view))}")
        if isinstance(view["item"], bool) or not isinstance(view["item"], (int, str, np.integer)):
            raise ValueError(
                f"an item in the history of request {number} must be an integer or a string, got {view['item']!r}"
            )
    return views


def _encode_views(
    flat: Sequence[tuple[int, Mapping[str, Any]]], encoder: FeatureEncoder, items: ItemTable, schema: Schema
) -> tuple[Array, Array]:
    """Return ids and values of views: from the catalogue if all history features are item features, else encoded."""
    rows = np.array([row for row, _ in flat], dtype=np.int64)
    own = {feature.name for feature in schema.items}
    age = schema.history[-1].name if schema.has_ages else None
    if all(feature.name in own for feature in schema.history if feature.name != age):
        ids = [items.ids[rows][:, schema.id_columns("items")[name]] for name in schema.id_columns("history")]
        values = [
            items.values[rows][:, schema.value_columns("items")[name]]
            for name in schema.value_columns("history")
            if name != age
        ]
        if age is not None:
            values.append(np.array([[_age(view, age)] for _, view in flat], dtype=np.float32).reshape(-1, 1))
        empty = (np.empty((len(rows), 0), dtype=np.int64), np.empty((len(rows), 0), dtype=np.float32))
        return np.concatenate([empty[0], *ids], axis=1), np.concatenate([empty[1], *values], axis=1)
    encoded = encoder.encode("history", [view for _, view in flat], partial=True)
    return encoded.ids, encoded.values


def _age(view: Mapping[str, Any], name: str) -> float:
    age = view.get(name)
    if isinstance(age, bool) or not isinstance(age, (int, float, np.number)) or not np.isfinite(age):
        raise ValueError(
            f"the model reads the age of each view; give views as {{'item': ITEM, {name!r}: SECONDS}}, got {dict(view)}"
        )
    return float(age)


def _padding(schema: Schema) -> Array:
    tables = [(schema.table(one.table), one.size) for one in schema.history if one.table is not None]
    return np.array([table.padding for table, size in tables for _ in range(size)], dtype=np.int64)


def _padded(flat: Array, length: Array, longest: int, padding: Array) -> Array:
    """Return the concatenated rows of all requests as a padded array, (B, longest, columns)."""
    made = np.empty((len(length), longest, flat.shape[1]), dtype=flat.dtype)
    made[:] = padding
    made[np.arange(longest) < length[:, None]] = flat
    return made
