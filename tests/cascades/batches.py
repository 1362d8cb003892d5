"""Random schemas and batches for the tests of stages and objectives."""

from __future__ import annotations

import torch

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.schema import Feature, Schema, Table


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


def random_ids(schema: Schema, kind: str, rows: int, generator: torch.Generator) -> torch.Tensor:
    columns = []
    for feature in getattr(schema, kind):
        table = schema.table(feature.table)
        ids = torch.randint(1, table.rows, (rows,), generator=generator)
        columns.append(torch.where(ids == table.padding, 1, ids))
    return torch.stack(columns, 1)


def random_batch(
    schema: Schema, size: int = 6, pool: int = 40, items: int = 12, length: int = 7, seed: int = 0
) -> CascadeBatch:
    generator = torch.Generator().manual_seed(seed)
    history = random_ids(schema, "history", size * length, generator).view(size, length, -1)
    history_length = torch.randint(0, length + 1, (size,), generator=generator)
    history_length[0] = 0
    padding = torch.tensor([schema.table(f.table).padding for f in schema.history])
    real = torch.arange(length) < history_length[:, None]
    mask = torch.rand(size, items, generator=generator) < 0.8
    mask[:, :2] = True
    labels = torch.randint(0, 30, (size, items), generator=generator).float() * mask
    labels[:, 0] = 20.0
    candidates = torch.rand(size, pool, generator=generator).argsort(1)[:, :items]
    return CascadeBatch(
        request_id=torch.arange(size),
        request=random_ids(schema, "request", size, generator),
        history=torch.where(real[..., None], history, padding),
        history_length=history_length,
        item_id=torch.arange(pool) + 1000,
        items=random_ids(schema, "items", pool, generator),
        candidates=torch.where(mask, candidates, 0),
        labels=labels,
        mask=mask,
        group=torch.where(mask, (labels <= 7).long(), -1),
    )
