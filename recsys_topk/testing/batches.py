"""Random batches for the contract of stages: every kind of feature, masks, empty histories and unused slots of bags."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.tabular.schema import Feature, Part, Schema, Table


def mixed_schema(ages: bool = False) -> Schema:
    """Return a schema with all kinds of features; two item features and the history share a table."""
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
            *((Feature("seconds", kind="age"),) if ages else ()),
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


def random_batch(
    schema: Schema, size: int = 6, pool: int = 40, items: int = 12, length: int = 7, seed: int = 0
) -> CascadeBatch:
    """Return a batch of `size` lists of up to `items` items of a pool. The first of the histories is empty."""
    generator = torch.Generator().manual_seed(seed)
    history = _ids(schema, "history", size * length, generator)
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
        request=_ids(schema, "request", size, generator),
        history=torch.where(real[..., None], history, padding_ids(schema, "history")),
        history_length=history_length,
        item_id=torch.arange(pool) + 1000,
        items=_ids(schema, "items", pool, generator),
        candidates=torch.where(mask, candidates, 0),
        labels=labels,
        mask=mask,
        group=torch.where(mask, (labels <= 7).long(), -1),
    )
    values = _values(schema, "history", size * length, generator).view(size, length, -1)
    made = made.replace(
        request_values=_values(schema, "request", size, generator) if schema.value_columns("request") else NO_VALUES,
        history_values=values * real[..., None] if values.shape[-1] else NO_VALUES,
        item_values=_values(schema, "items", pool, generator) if schema.value_columns("items") else NO_VALUES,
    )
    if schema.has_ages:
        gaps = torch.rand(size, length, generator=generator).mul(20.0).exp()
        made.history_values[..., -1] = gaps.flip(1).cumsum(1).flip(1) * real
    return made


def shared_histories(batch: CascadeBatch, requests: int = 3, seed: int = 0) -> CascadeBatch:
    """Return a batch with `requests` requests per history of `batch`, each of which sees a random prefix of it."""
    row = torch.arange(batch.size).repeat(requests)
    drawn = torch.rand(len(row), generator=torch.Generator().manual_seed(seed))
    prefix = (drawn * (batch.history_length[row] + 1)).long()
    names = ("request", "candidates", "labels", "mask", "group")
    parts = {name: getattr(batch, name)[row] for name in names}
    if batch.request_values.numel():
        parts["request_values"] = batch.request_values[row]
    return batch.replace(**parts, request_id=torch.arange(len(row)), history_row=row, history_prefix=prefix)


def padding_ids(schema: Schema, part: Part) -> Tensor:
    """Return the ids of a row of padding."""
    return torch.tensor(schema.padding(part), dtype=torch.int64)


def _ids(schema: Schema, part: Part, rows: int, generator: torch.Generator) -> Tensor:
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


def _values(schema: Schema, part: Part, rows: int, generator: torch.Generator) -> Tensor:
    width = sum(feature.size for feature in schema.features(part) if feature.table is None)
    return torch.randn(rows, width, generator=generator)
