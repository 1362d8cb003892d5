"""Random schemas and batches for the tests of stages and objectives."""

from __future__ import annotations

import torch

from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.tabular.schema import Feature, Part, Schema, Table


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


def mixed_schema() -> Schema:
    """A schema with all four kinds of features; two item features and the history share a table."""
    return Schema(
        tables=(Table("user", 30), Table("video", 60, padding=3), Table("genre", 12), Table("word", 40)),
        request=(
            Feature("age", kind="numeric"),
            Feature("user_id", "user"),
            Feature("query", "word", "bag", 3),
            Feature("place", kind="vector", size=2),
        ),
        history=(
            Feature("video_id", "video"),
            Feature("dwell", kind="numeric"),
            Feature("genres", "genre", "bag", 2),
        ),
        items=(
            Feature("title", "word", "bag", 4),
            Feature("video_id", "video"),
            Feature("price", kind="numeric"),
            Feature("similar_id", "video"),
            Feature("genres", "genre", "bag", 2),
            Feature("picture", kind="vector", size=3),
        ),
        positive_above=7.0,
    )


def random_ids(schema: Schema, part: Part, rows: int, generator: torch.Generator) -> torch.Tensor:
    columns = [torch.empty(rows, 0, dtype=torch.int64)]
    for feature in schema.features(part):
        if feature.table is None:
            continue
        table = schema.table(feature.table)
        ids = torch.randint(1, table.rows, (rows, feature.size), generator=generator)
        ids = torch.where(ids == table.padding, 1, ids)
        if feature.kind == "bag":  # some slots are unused, in some rows all of them
            ids = torch.where(torch.rand(rows, feature.size, generator=generator) < 0.5, table.padding, ids)
        columns.append(ids)
    return torch.cat(columns, 1)


def random_values(schema: Schema, part: Part, rows: int, generator: torch.Generator) -> torch.Tensor:
    width = sum(feature.size for feature in schema.features(part) if feature.table is None)
    return torch.randn(rows, width, generator=generator) if width else NO_VALUES


def padding_ids(schema: Schema, part: Part) -> torch.Tensor:
    tables = [(schema.table(f.table), f.size) for f in schema.features(part) if f.table is not None]
    return torch.tensor([table.padding for table, size in tables for _ in range(size)], dtype=torch.int64)


def random_batch(
    schema: Schema, size: int = 6, pool: int = 40, items: int = 12, length: int = 7, seed: int = 0
) -> CascadeBatch:
    generator = torch.Generator().manual_seed(seed)
    history = random_ids(schema, "history", size * length, generator)
    history = history.view(size, length, history.shape[1])
    history_length = torch.randint(0, length + 1, (size,), generator=generator)
    history_length[0] = 0
    real = torch.arange(length) < history_length[:, None]
    mask = torch.rand(size, items, generator=generator) < 0.8
    mask[:, :2] = True
    labels = torch.randint(0, 30, (size, items), generator=generator).float() * mask
    labels[:, 0] = 20.0
    candidates = torch.rand(size, pool, generator=generator).argsort(1)[:, :items]
    made = CascadeBatch(
        request_id=torch.arange(size),
        request=random_ids(schema, "request", size, generator),
        history=torch.where(real[..., None], history, padding_ids(schema, "history")),
        history_length=history_length,
        item_id=torch.arange(pool) + 1000,
        items=random_ids(schema, "items", pool, generator),
        candidates=torch.where(mask, candidates, 0),
        labels=labels,
        mask=mask,
        group=torch.where(mask, (labels <= 7).long(), -1),
    )
    values = random_values(schema, "history", size * length, generator)
    return made.replace(
        request_values=random_values(schema, "request", size, generator),
        history_values=values.view(size, length, -1) * real[..., None] if len(values) else NO_VALUES,
        item_values=random_values(schema, "items", pool, generator),
    )
