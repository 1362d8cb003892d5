"""All items of a shard on a device, from which negatives are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.datamodules.negatives.sampling import Drawn, Occurrences, Uniform
from recsys_topk.ops.dispatch import may_read
from recsys_topk.tabular.schema import VARIANT


class Catalogue:
    """All items of a shard on a device. Uniform and popularity negatives are drawn from it.

    Args:
        item_id: (C,) int64, ascending, distinct, from 0 to below `VARIANT`.
        features: (C, F_i) integers, as in `CascadeBatch.items`.
        count: (C,) integers, number of occurrences of each item in the shard's lists; None = one.
        values: (C, V_i) float32, as in `CascadeBatch.item_values`; (0, 0) if the schema has none.

    Example:
        >>> catalogue = Catalogue(torch.tensor([10, 20, 30]), torch.tensor([[1], [2], [3]]))
        >>> len(catalogue), catalogue.rows(torch.tensor([30, 10]))
        (3, tensor([2, 0]))
    """

    def __init__(
        self, item_id: Tensor, features: Tensor, count: Tensor | None = None, values: Tensor = NO_VALUES
    ) -> None:
        if item_id.device.type == "cpu" and item_id.numel():
            if not bool((item_id[1:] > item_id[:-1]).all()):
                raise ValueError("item_id of a catalogue must be ascending, with no id twice; sort the items by id")
            if item_id[0] < 0 or item_id[-1] >= VARIANT:
                raise ValueError(f"item ids must be in 0..2^40-1, got {int(item_id[0])}..{int(item_id[-1])}")
        self.item_id = item_id
        self.features = features
        self.count = torch.ones_like(item_id) if count is None else count
        self.values = values
        # Computed on the CPU, so that the first use of `popular` on a GPU needs no synchronisation.
        self._total = int(self.count.sum()) if self.count.is_cpu else None
        for name, column in (("features", features), ("count", self.count), ("values", values)):
            if column.shape[0] != item_id.numel() and (name != "values" or column.numel()):
                raise ValueError(f"the catalogue has {item_id.numel()} item ids and {column.shape[0]} rows of {name}")
        self._place = torch.empty(item_id.numel() + 1, dtype=torch.int64, device=item_id.device)
        self._slots: Tensor | None = None
        self._share: Tensor | None = None

    def __len__(self) -> int:
        return self.item_id.numel()

    def to(self, device: torch.device | str) -> Catalogue:
        """Return the catalogue on a device."""
        if self.item_id.device == torch.device(device):
            return self
        moved = Catalogue(*(part.to(device) for part in (self.item_id, self.features, self.count, self.values)))
        moved._total = self._total
        return moved

    @property
    def uniform(self) -> Uniform:
        """The source that draws all items with equal probability."""
        return Uniform(self.item_id.numel(), self.item_id.device)

    @property
    def popular(self) -> Occurrences:
        """The source that draws items in proportion to their count.

        The first use synchronises with the GPU if the catalogue was created there instead of moved there by `to`.
        """
        if self._slots is None:
            numbers = torch.arange(self.item_id.numel(), dtype=torch.int32, device=self.item_id.device)
            self._slots = numbers.repeat_interleave(self.count.long(), output_size=self._total)
        return Occurrences(self._slots, self.item_id.numel())

    @property
    def share(self) -> Tensor:
        """(C,) float64, the share of each item in all counts."""
        if self._share is None:
            self._share = self.count.double() / self.count.sum().clamp_min(1)
        return self._share

    def rows(self, item_id: Tensor) -> Tensor:
        """Return the row of each item. All items must be in the catalogue; a variant has the row of its item."""
        return torch.searchsorted(self.item_id, item_id % VARIANT)

    def add_to_pool(self, batch: CascadeBatch, rows: Tensor, drawn: Drawn) -> tuple[CascadeBatch, Tensor]:
        """Return the batch with the drawn rows added once to its pool, and the draws as indices into the pool.

        On devices other than the CPU the pool grows by the maximum possible number of new rows, to avoid a
        synchronisation. The unused rows repeat the features of an item and have distinct negative ids. No list points
        to them.

        Args:
            batch: The batch.
            rows: (M,) the catalogue rows of the pool items, from `rows`.
            drawn: The drawn rows.
        """
        size, pool, device = self.item_id.numel(), batch.item_id.numel(), self.item_id.device
        # A drawn item has the features of the catalogue. A variant in the pool has others, so it is not reused.
        pooled = torch.where(batch.item_id < VARIANT, rows, size)
        fresh = torch.zeros(size + 1, dtype=torch.bool, device=device)
        fresh.index_fill_(0, torch.where(drawn.mask, drawn.items, size).view(-1), True)
        fresh.index_fill_(0, pooled, False)
        place = self._place.scatter_(0, pooled, torch.arange(pool, device=device))
        if may_read(fresh):
            new = fresh[:size].nonzero().squeeze(1)
            ids = self.item_id.take(new)
            place.scatter_(0, new, torch.arange(pool, pool + new.numel(), device=device))
        else:
            new, ids = self._new_rows(fresh[:size], place, pool, min(drawn.items.numel(), size))
        items = batch.items.new_empty((pool + new.numel(), batch.items.shape[1]))
        items[:pool] = batch.items
        items[pool:] = _gather(self.features, new)
        grown = batch.replace(item_id=torch.cat([batch.item_id, ids]), items=items)
        if self.values.shape[1]:
            grown = grown.replace(item_values=torch.cat([batch.item_values, _gather(self.values, new)]))
        return grown, torch.where(drawn.mask, place.take(drawn.items), 0)

    def _new_rows(self, fresh: Tensor, place: Tensor, pool: int, most: int) -> tuple[Tensor, Tensor]:
        """Return the rows that are new in the pool and their ids, (most,) each. Update `place` in place."""
        rows, order = torch.arange(len(fresh), device=fresh.device), fresh.cumsum(0) - 1
        place[:-1] = torch.where(fresh, pool + order, place[:-1])
        new = rows.new_zeros(most + 1).scatter_(0, torch.where(fresh, order, most), rows)[:most]
        spare = torch.arange(most, device=fresh.device)
        return new, torch.where(spare <= order[-1:], self.item_id.take(new), -1 - spare)


def _gather(table: Tensor, rows: Tensor) -> Tensor:
    """Return the given rows of a table. On the CPU numpy is used, because it gathers short rows faster than torch."""
    if table.device.type == "cpu":
        return torch.from_numpy(table.numpy().take(rows.numpy(), axis=0))
    return table.index_select(0, rows)
