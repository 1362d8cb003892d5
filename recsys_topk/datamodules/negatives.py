"""Negative expansion: append sampled items to every list as indices into the pool, on the batch's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.datamodules.draws import request_keys
from recsys_topk.datamodules.recflow.rows import VARIANT
from recsys_topk.datamodules.sampling import Drawn, Occurrences, Uniform, draw_distinct

if TYPE_CHECKING:
    from recsys_topk.datamodules.recflow.cache import PreparedDay

NegativeSource = Literal["in_batch", "uniform", "popularity"]


class Catalogue:
    """The items of a day on a device: what uniform and popular negatives are drawn from.

    Args:
        item_id: (C,) int64, ascending.
        features: (C, F_i) integers.
        count: (C,) integers, in how many slots of the day each item stands.
    """

    def __init__(self, item_id: Tensor, features: Tensor, count: Tensor) -> None:
        self.item_id = item_id
        self.features = features
        self.count = count
        self._place = torch.empty(item_id.numel() + 1, dtype=torch.int64, device=item_id.device)
        self._slots: Tensor | None = None

    @classmethod
    def of_day(cls, day: PreparedDay, device: torch.device | str = "cpu") -> Catalogue:
        """Return the items of a prepared day; an item with several rows of features has its first."""
        items = int(day.first_rows.max(initial=-1)) + 1
        count = np.bincount(day.first_rows, weights=day.catalogue["count"], minlength=items).astype(np.int64)
        columns = (day.catalogue["item_id"][:items].copy(), day.item_rows[:items], count)
        return cls(*(torch.from_numpy(column).to(device) for column in columns))

    @property
    def uniform(self) -> Uniform:
        """The source in which all items are equally likely."""
        return Uniform(self.item_id.numel(), self.item_id.device)

    @property
    def popular(self) -> Occurrences:
        """The source in which items are drawn in proportion to their count."""
        if self._slots is None:
            numbers = torch.arange(self.item_id.numel(), dtype=torch.int32, device=self.item_id.device)
            self._slots = numbers.repeat_interleave(self.count.long())
        return Occurrences(self._slots, self.item_id.numel())

    def rows(self, item_id: Tensor) -> Tensor:
        """Return the row of each item, which must all be there; variants of an item have its row."""
        return torch.searchsorted(self.item_id, item_id % VARIANT)

    def add_to_pool(self, batch: CascadeBatch, rows: Tensor, drawn: Drawn) -> tuple[CascadeBatch, Tensor]:
        """Return the batch with the drawn rows in its pool, each once, and the draws as indices into the pool.

        Args:
            batch: The batch.
            rows: (M,) the rows of its pool, from `rows`.
            drawn: Rows drawn.
        """
        size, pool, device = self.item_id.numel(), batch.item_id.numel(), self.item_id.device
        # A pool item that is a variant does not stand for the item that is drawn, whose features are its first.
        pooled = torch.where(batch.item_id < VARIANT, rows, size)
        fresh = torch.zeros(size + 1, dtype=torch.bool, device=device)
        fresh.index_fill_(0, torch.where(drawn.mask, drawn.items, size).view(-1), True)
        fresh.index_fill_(0, pooled, False)
        new = fresh[:size].nonzero().squeeze(1)
        place = self._place.scatter_(0, pooled, torch.arange(pool, device=device))
        place.scatter_(0, new, torch.arange(pool, pool + new.numel(), device=device))
        items = batch.items.new_empty((pool + new.numel(), batch.items.shape[1]))
        items[:pool] = batch.items
        items[pool:] = _gather(self.features, new)
        grown = batch.replace(item_id=torch.cat([batch.item_id, self.item_id.take(new)]), items=items)
        return grown, torch.where(drawn.mask, place.take(drawn.items), 0)


def _gather(table: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a table; on the CPU by numpy, whose gather of short rows is the faster one."""
    if table.device.type == "cpu":
        return torch.from_numpy(table.numpy().take(rows.numpy(), axis=0))
    return table.index_select(0, rows)


@dataclass(frozen=True)
class Expansion:
    """A batch with negatives, and how the drawing went.

    Attributes:
        batch: The batch; lists have `number` columns more.
        drawn: Scalar tensor, draws looked at.
        rejected: Scalar tensor, draws that were an item of the list, or drawn for it before.
    """

    batch: CascadeBatch
    drawn: Tensor
    rejected: Tensor


def expand(
    batch: CascadeBatch,
    number: int,
    *,
    seed: int,
    group: int,
    source: NegativeSource = "uniform",
    catalogue: Catalogue | None = None,
    pool_rows: Tensor | None = None,
) -> Expansion:
    """Append `number` sampled negatives to every list: columns of indices, no copies of features.

    A list never gets an item that it already has (the same item, not the same slot), never padding, and no item twice;
    where there are not enough others, the rest of its columns is masked. The draws of a request depend on the seed, on
    its id, on its own items and on the source; from a catalogue, therefore, on nothing else in the batch.

    Args:
        batch: The batch.
        number: Negatives a list, n.
        seed: The same seed gives the same negatives.
        group: What to write into the `group` of sampled candidates.
        source: ``"in_batch"`` (items of the other lists, as often as they occur there), ``"uniform"`` over the
            catalogue, or ``"popularity"`` (in proportion to the slots an item has on that day).
        catalogue: The items of the batch's day; not needed for ``"in_batch"``.
        pool_rows: (M,) the row of each pool item in the catalogue, if known; None = look it up by item id.

    Returns:
        The batch with (B, N + n) lists; sampled candidates have label 0.
    """
    if number < 0:
        raise ValueError(f"the number of negatives must not be negative, got {number}")
    keys = request_keys(seed, batch.request_id)
    if source == "in_batch":
        drawn, columns = _from_batch(batch, keys, number)
    elif catalogue is None:
        raise ValueError(f"{source!r} negatives are drawn from a catalogue, and none was given")
    elif source in ("uniform", "popularity"):
        rows = catalogue.rows(batch.item_id) if pool_rows is None else pool_rows
        own = rows.take(batch.candidates)
        drawn = draw_distinct(
            catalogue.uniform if source == "uniform" else catalogue.popular, keys, own, batch.mask, number
        )
        batch, columns = catalogue.add_to_pool(batch, rows, drawn)
    else:
        raise ValueError(f"source must be 'in_batch', 'uniform' or 'popularity', got {source!r}")
    expanded = batch.replace(
        candidates=torch.cat([batch.candidates, columns], 1),
        labels=torch.nn.functional.pad(batch.labels, (0, number)),
        mask=torch.cat([batch.mask, drawn.mask], 1),
        group=torch.cat([batch.group, torch.where(drawn.mask, group, -1)], 1),
    )
    return Expansion(expanded, drawn.drawn, drawn.rejected)


def _from_batch(batch: CascadeBatch, keys: Tensor, number: int) -> tuple[Drawn, Tensor]:
    """Draw from the lists of the batch; also return the draws as indices into the pool, 0 where masked."""
    size = batch.item_id.numel()
    if not bool((batch.item_id >= VARIANT).any()):
        drawn = draw_distinct(
            Occurrences(batch.candidates.masked_select(batch.mask), size), keys, batch.candidates, batch.mask, number
        )
        return drawn, drawn.items
    # Several pool rows may be variants of one item: draw items, then point at one of its rows.
    items, item = torch.unique(batch.item_id % VARIANT, return_inverse=True)
    row = torch.empty_like(items).scatter_(0, item, torch.arange(size, device=item.device))
    own = item[batch.candidates]
    drawn = draw_distinct(Occurrences(own.masked_select(batch.mask), items.numel()), keys, own, batch.mask, number)
    return drawn, torch.where(drawn.mask, row[drawn.items], 0)
