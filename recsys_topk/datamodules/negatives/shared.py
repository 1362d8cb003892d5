"""Negatives that all lists of a batch share: the same sampled items, or the whole catalogue."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.catalogue import Catalogue
from recsys_topk.datamodules.negatives.draws import request_keys
from recsys_topk.datamodules.negatives.sampling import draw_distinct


def expand_shared(
    batch: CascadeBatch,
    number: int,
    *,
    seed: int,
    group: int,
    catalogue: Catalogue,
    pool_rows: Tensor | None = None,
    excluded: Tensor | None = None,
    log_q: bool = False,
) -> CascadeBatch:
    """Append the same `number` items of the catalogue, drawn uniformly without repeats, to every list.

    They are embedded once for the whole batch. An item is masked in a list that has it, or that excludes it. Every item
    is drawn with probability n / C, so the logQ correction is exact.

    Args:
        batch: The batch.
        number: Negatives per list, n.
        seed: The draws depend on it and on the first request.
        group: The value of `CascadeBatch.group` for sampled candidates.
        catalogue: The items of the batch's shard, C of them.
        pool_rows: (M,) the catalogue row of each pool item; None = look it up by item id.
        excluded: (B, E) int64, catalogue rows that must not be negatives of each list; -1 = padding.
        log_q: Whether to fill `CascadeBatch.log_q`.
    """
    rows = catalogue.rows(batch.item_id) if pool_rows is None else pool_rows
    none = rows.new_empty((1, 0))
    drawn = draw_distinct(
        catalogue.uniform, request_keys(seed, batch.request_id[:1]), none, none.bool(), min(number, len(catalogue))
    )
    lists = torch.where(batch.mask, rows.take(batch.candidates), -1)
    taken = lists if excluded is None else torch.cat([lists, excluded], 1)
    # One place per item of the catalogue is cheaper than a comparison of all pairs.
    place = rows.new_full((len(catalogue) + 1,), drawn.items.shape[1])
    place.scatter_(0, drawn.items[0], torch.arange(drawn.items.shape[1], device=rows.device))
    mask = drawn.mask.repeat(batch.size, 1)
    mask = F.pad(mask, (0, 1)).scatter_(1, place[taken], False)[:, :-1]
    batch, columns = catalogue.add_to_pool(batch, rows, drawn)
    correction: dict[str, Any] = {}
    if log_q:
        inclusion = math.log(drawn.items.shape[1] / max(1, len(catalogue)))
        correction["log_q"] = F.pad(torch.where(mask, inclusion, 0.0), (batch.candidates.shape[1], 0))
        correction["catalogue_items"] = len(catalogue)
    return batch.replace(
        candidates=torch.cat([batch.candidates, columns.expand(batch.size, -1)], 1),
        labels=F.pad(batch.labels, (0, mask.shape[1])),
        mask=torch.cat([batch.mask, mask], 1),
        group=torch.cat([batch.group, torch.where(mask, group, -1)], 1),
        sampled=mask.shape[1],
        **correction,
    )


def against_catalogue(
    batch: CascadeBatch,
    catalogue: Catalogue,
    pool_rows: Tensor | None = None,
    excluded: Tensor | None = None,
    sample: int | None = None,
) -> CascadeBatch:
    """Return the batch with the whole catalogue as its pool, so that every item competes with those of each list.

    Args:
        batch: The batch.
        catalogue: The items of the batch's shard.
        pool_rows: (M,) the catalogue row of each pool item; None = look it up by item id.
        excluded: The result of `Shard.excluded`, which becomes `CascadeBatch.known`.
        sample: Number of items in the softmax of a step, which becomes `CascadeBatch.sampled`; None = all.
    """
    rows = catalogue.rows(batch.item_id) if pool_rows is None else pool_rows
    return batch.replace(
        item_id=catalogue.item_id,
        items=catalogue.features.long(),
        item_values=catalogue.values,
        candidates=rows.take(batch.candidates),
        known=rows.new_empty((batch.history.shape[0], 0)) if excluded is None else excluded,
        catalogue=True,
        sampled=sample or 0,
    )
