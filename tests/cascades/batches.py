"""Random schemas and batches for the tests of stages and objectives."""

from __future__ import annotations

from recsys_topk.tabular.schema import Feature, Schema, Table
from recsys_topk.testing.batches import mixed_schema, padding_ids, random_batch

__all__ = ["mixed_schema", "padding_ids", "random_batch", "recflow_like_schema"]


def recflow_like_schema(users: int = 50, items: int = 200) -> Schema:
    sizes = {
        "user_id": users, "device_id": users, "gender": 3, "age": 8, "province": 30, "video_id": items,
        "author_id": items // 4, "category_level_two": 20, "category_level_one": 10, "upload_type": 5,
        "weekday": 7, "hour": 24, "minute": 60,
    }  # fmt: skip
    padding = {"category_level_one": 2}
    tables = tuple(Table(name, rows + 2, padding.get(name, 0)) for name, rows in sizes.items())
    time = ("weekday", "hour", "minute")
    shared = ("video_id", "author_id", "category_level_two", "category_level_one", "upload_type")
    user = ("user_id", "device_id", "gender", "age", "province")
    return Schema(
        tables=tables,
        request=tuple(Feature(name, name) for name in (*time, *user)),
        history=tuple(Feature(name, name) for name in shared),
        items=(*(Feature(n, n) for n in shared), *(Feature(f"upload_{n}", n) for n in time)),
        groups=("rank_pos", "rank_neg"),
        positive_above=7.0,
    )
