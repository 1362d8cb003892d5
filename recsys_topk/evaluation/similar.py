"""The nearest items of an item by the item vectors of the first stage."""

from __future__ import annotations

from typing import Any

import torch

from recsys_topk.cascades.module import CascadeModule
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.evaluation.search import ExactSearch
from recsys_topk.serving.index import nearest_items


def similar_items(model: CascadeModule, data: CascadeDataModule, item: int | str, number: int = 10) -> list[Any]:
    """Return the nearest items of an item in the catalogue of the newest test shard, as (name, cosine), nearest first.

    Args:
        model: The model; its first stage must have towers.
        data: The data module, prepared.
        item: Name of the item in the data.
        number: Number of items.
    """
    stage = model.cascade.scorer(model.cascade.names[0])
    shard = data.splits["test"][-1]
    items = data.catalogue(shard, model.device)
    batch = next(iter(data.loader([shard], training=False)))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            vectors = ExactSearch(stage, items).vectors(batch.to(model.device).plain())
    finally:
        model.train(was_training)
    names = data.item_names(items.item_id.cpu().numpy())
    return nearest_items(vectors.cpu().numpy(), names, item, number)
