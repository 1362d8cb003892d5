"""Count how often each item is a positive in the training data, for baselines."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recsys_topk.processes import sum_over_job
from recsys_topk.tabular.schema import VARIANT

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule

_AT_ONCE = 1 << 22


class Popularity:
    """Number of positives per item over the training shards, from one pass over their batches.

    Memory: O(distinct items). With several processes, each process counts its share, and `counts` sums over processes.

    Args:
        data: The prepared data module.
        requests: Approximate maximum number of requests to count, from the last shards first; None = all.

    Attributes:
        item_id: (D,) int64, the positive items in the share of this process, ascending.
        count: (D,) int64, number of positives of each of these items.
    """

    def __init__(self, data: CascadeDataModule, requests: int | None = None) -> None:
        self.item_id = torch.empty(0, dtype=torch.int64)
        self.count = torch.empty(0, dtype=torch.int64)
        above, waiting, parts = data.schema.positive_above, 0, []
        shards = list(reversed(data.splits["train"]))
        loader = data.loader(shards, training=False) if shards else None
        number = None if requests is None or loader is None else -(-requests // loader.batch_size)
        for batch in itertools.islice(loader, number) if loader is not None else ():
            positive = batch.candidates[batch.mask & (batch.labels > above)]
            parts.append((batch.item_id[positive] % VARIANT).cpu())
            waiting += positive.numel()
            if waiting > _AT_ONCE:
                self._add(torch.cat(parts))
                waiting, parts = 0, []
        if parts:
            self._add(torch.cat(parts))

    def counts(self, item_id: Tensor) -> Tensor:
        """Return the count of each item, (C,) int64, summed over all processes; 0 for items without a positive.

        Args:
            item_id: (C,) int64.
        """
        return sum_over_job(self.local_counts(item_id))

    def local_counts(self, item_id: Tensor) -> Tensor:
        """Return the count of each item in the share of this process, int64 in the shape of `item_id`."""
        if not self.item_id.numel():
            return torch.zeros_like(item_id)
        ids = item_id.cpu().contiguous()
        rows = torch.searchsorted(self.item_id, ids).clamp_max(self.item_id.numel() - 1)
        return torch.where(self.item_id[rows] == ids, self.count[rows], 0).to(item_id.device)

    def _add(self, item_id: Tensor) -> None:
        ids = torch.cat([self.item_id, item_id])
        counts = torch.cat([self.count, torch.ones_like(item_id)])
        self.item_id, place = torch.unique(ids, return_inverse=True)
        self.count = torch.zeros_like(self.item_id).index_add_(0, place, counts)
