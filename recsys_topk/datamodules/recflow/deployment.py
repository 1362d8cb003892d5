"""Users and encoder of RecFlow, for an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from recsys_topk.datamodules.recflow.layout import (
    CLOCK,
    HISTORY_FEATURES,
    ITEM_FEATURES,
    ITEM_IDS,
    REQUEST_FEATURES,
    stored_offset,
)
from recsys_topk.datamodules.recflow.shard import DayShard
from recsys_topk.tabular.export_tables import ItemTable, UserTable, newest_rows
from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.ids.vocabulary import DenseVocabulary, Vocabulary


def recflow_encoder(vocabularies: Mapping[str, Vocabulary]) -> FeatureEncoder:
    """Return the encoder of raw RecFlow features: ids as in the files, clock features as numbers.

    Args:
        vocabularies: The vocabulary of each id field.
    """
    clock = {unit: DenseVocabulary(rows) for unit, rows in CLOCK.items()}
    items = {
        name: {"kind": "categorical", "table": name if name in ITEM_IDS else name.removeprefix("upload_")}
        for name in ITEM_FEATURES
    }
    request = {name: {"kind": "categorical", "table": name} for name in REQUEST_FEATURES}
    described = Description.from_plain({"user": request, "items": items, "history": list(HISTORY_FEATURES)})
    return FeatureEncoder(described, {}, {**vocabularies, **clock})


def recflow_users(shards: Sequence[DayShard], items: ItemTable) -> UserTable:
    """Return the newest request of each user.

    Args:
        shards: The days, oldest first.
        items: The catalogue, used to look up the items of histories.
    """
    names = [shard.day.stored_requests["user_id"].astype(np.int64) - stored_offset("user_id") for shard in shards]
    parts = []
    for shard, own, rows in zip(shards, names, newest_rows(names), strict=True):
        batch = shard.batch(rows)
        views = shard.day.stored_views["video_id"].astype(np.int64) - stored_offset("video_id")
        stored = shard.day.stored_requests["history"][rows]
        seen = items.index.rows(np.append(views, -1)[stored].ravel()).reshape(stored.shape)
        parts.append((own[rows], batch.request.numpy(), batch.history.numpy(), batch.history_length.numpy(), seen))
        shard.release()
    name, request, history, length, seen = (np.concatenate(column) for column in zip(*parts, strict=True))
    ends = np.cumsum((seen >= 0).sum(1))
    none = np.empty((len(name), 0), dtype=np.float32)
    no_values = np.empty((*history.shape[:2], 0), dtype=np.float32)
    return UserTable(name, request, none, history, length, no_values, seen[seen >= 0], ends).sorted()
