"""How often each item was a positive in the training data, for baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recsys_topk.datamodules.schema import VARIANT

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule

_AT_ONCE = 1 << 22


class Popularity:
    """Counts of positives over the training shards, from one pass over their batches.

    Memory: O(distinct items). With several processes each counts its share; `counts` adds them up.

    Args:
        data: The data module, prepared.

    Attributes:
        item_id: (D,) int64, the items that were a positive in this process's share, ascending.
        count: (D,) int64, how often.
    """

    def __init__(self, data: CascadeDataModule) -> None:
        self.item_id = torch.empty(0, dtype=torch.int64)
        self.count = torch.empty(0, dtype=torch.int64)
        above, waiting, parts = data.schema.positive_above, 0, []
        shards = data.splits["train"]
        for batch in data.loader(shards, training=False) if shards else ():
            positive = batch.candidates[batch.mask & (batch.labels > above)]
            parts.append(batch.item_id[positive] % VARIANT)
            waiting += positive.numel()
            if waiting > _AT_ONCE:
                self._add(torch.cat(parts))
                waiting, parts = 0, []
        if parts:
            self._add(torch.cat(parts))

    def counts(self, item_id: Tensor) -> Tensor:
        """Return the count of each item of a catalogue, (C,) int64, over all processes; 0 for items never seen.

        Args:
            item_id: (C,) int64, ascending.
        """
        found = torch.zeros(item_id.numel(), dtype=torch.int64)
        if found.numel() and self.item_id.numel():
            ids = item_id.cpu()
            rows = torch.searchsorted(ids, self.item_id).clamp_max(ids.numel() - 1)
            known = ids[rows] == self.item_id
            found[rows[known]] = self.count[known]
        found = found.to(item_id.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(found)
        return found

    def _add(self, item_id: Tensor) -> None:
        ids = torch.cat([self.item_id, item_id])
        counts = torch.cat([self.count, torch.ones_like(item_id)])
        self.item_id, place = torch.unique(ids, return_inverse=True)
        self.count = torch.zeros_like(self.item_id).index_add_(0, place, counts)
