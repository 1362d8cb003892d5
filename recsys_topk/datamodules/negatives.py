"""Negative expansion: append sampled items to every list as indices into the pool, on the batch's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.datamodules.draws import request_keys
from recsys_topk.datamodules.sampling import Drawn, Occurrences, Uniform, draw_distinct
from recsys_topk.datamodules.schema import VARIANT
from recsys_topk.ops.dispatch import may_read

NegativeSource = Literal["in_batch", "in_global_batch", "uniform", "popularity"]


class Catalogue:
    """All items of a shard on a device: what uniform and popular negatives are drawn from.

    Args:
        item_id: (C,) int64, ascending, below `VARIANT`.
        features: (C, F_i) integers, as `CascadeBatch.items` holds them.
        count: (C,) integers, how often each item occurs in the shard's lists; None = once.
        values: (C, V_i) float32, as `CascadeBatch.item_values` holds them; (0, 0) if the schema has none.

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
        for name, column in (("features", features), ("count", self.count), ("values", values)):
            if column.shape[0] != item_id.numel() and (name != "values" or column.numel()):
                raise ValueError(f"the catalogue has {item_id.numel()} item ids and {column.shape[0]} rows of {name}")
        self._place = torch.empty(item_id.numel() + 1, dtype=torch.int64, device=item_id.device)
        self._slots: Tensor | None = None

    def __len__(self) -> int:
        return self.item_id.numel()

    def to(self, device: torch.device | str) -> Catalogue:
        """Return the catalogue on a device."""
        if self.item_id.device == torch.device(device):
            return self
        return Catalogue(*(part.to(device) for part in (self.item_id, self.features, self.count, self.values)))

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

        Off the CPU the pool grows by as many rows as could be new, so that nothing waits for their number. Those that
        are left over repeat the features of an item, have ids of their own below 0, and no list points at them.

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
        """Return the rows that are new in the pool and their ids, (most,) each, and write their places."""
        rows, order = torch.arange(len(fresh), device=fresh.device), fresh.cumsum(0) - 1
        place[:-1] = torch.where(fresh, pool + order, place[:-1])
        new = rows.new_zeros(most + 1).scatter_(0, torch.where(fresh, order, most), rows)[:most]
        spare = torch.arange(most, device=fresh.device)
        return new, torch.where(spare <= order[-1:], self.item_id.take(new), -1 - spare)


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
    excluded: Tensor | None = None,
    processes: int = 1,
) -> Expansion:
    """Append `number` sampled negatives to every list: columns of indices, no copies of features.

    A list never gets an item that it already has (the same item, not the same slot), never padding, and no item twice.
    Where there are not enough others, the remaining columns are masked. The draws of a request depend on the seed, on
    its id, on its own items and on the source. With a catalogue they do not depend on the rest of the batch.

    Args:
        batch: The batch.
        number: Negatives per list, n.
        seed: The same seed gives the same negatives.
        group: What to write into the `group` of sampled candidates.
        source: ``"in_batch"`` (items of the other lists, as often as they occur there), ``"in_global_batch"`` (the same
            with the lists of all processes; one exchange of (B, N) integers per batch), ``"uniform"`` over the
            catalogue, or ``"popularity"`` (in proportion to how often an item occurs in the shard).
        catalogue: The items of the batch's shard; needed for ``"in_batch"`` only with `excluded`.
        pool_rows: (M,) the row of each pool item in the catalogue, if known; None = look it up by item id.
        excluded: (B, E) int64, catalogue rows that each list must not get besides its own items; -1 = padding.
        processes: Number of processes whose batches form the global one; all must call this at the same time.

    Returns:
        The batch with (B, N + n) lists; sampled candidates have label 0.
    """
    if number < 0:
        raise ValueError(f"the number of negatives must not be negative, got {number}")
    keys = request_keys(seed, batch.request_id)
    if source not in get_args(NegativeSource):
        raise ValueError(f"source must be one of {', '.join(get_args(NegativeSource))}, got {source!r}")
    if source == "in_batch" and excluded is None:
        drawn, columns = _from_batch(batch, keys, number)
    elif catalogue is None:
        what = "excluded items are rows of" if source == "in_batch" else f"{source!r} negatives are drawn from"
        raise ValueError(f"{what} a catalogue, and none was given")
    else:
        rows = catalogue.rows(batch.item_id) if pool_rows is None else pool_rows
        own, mask = rows.take(batch.candidates), batch.mask
        if excluded is not None:
            own, mask = torch.cat([own, excluded.clamp_min(0)], 1), torch.cat([mask, excluded >= 0], 1)
        if source in ("in_batch", "in_global_batch"):
            lists, real = rows.take(batch.candidates), batch.mask
            if source == "in_global_batch" and processes > 1:
                lists, real = gather_lists(lists, real)
            drawn = draw_distinct(Occurrences.in_lists(lists, real, len(catalogue)), keys, own, mask, number)
        else:
            drawn = draw_distinct(
                catalogue.uniform if source == "uniform" else catalogue.popular, keys, own, mask, number
            )
        batch, columns = catalogue.add_to_pool(batch, rows, drawn)
    expanded = batch.replace(
        candidates=torch.cat([batch.candidates, columns], 1),
        labels=torch.nn.functional.pad(batch.labels, (0, number)),
        mask=torch.cat([batch.mask, drawn.mask], 1),
        group=torch.cat([batch.group, torch.where(drawn.mask, group, -1)], 1),
    )
    return Expansion(expanded, drawn.drawn, drawn.rejected)


def gather_lists(lists: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lists of all processes in the order in which one process would have them, with their mask.

    Row i of process r of R is row i R + r there, as `ShardLoader` deals requests. Processes may have different numbers
    of lists; the missing ones are masked.

    Args:
        lists: (B, N) int64.
        mask: Boolean (B, N).
    """
    size = torch.tensor(lists.shape, device=lists.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    rows, columns = size.tolist()
    own = torch.nn.functional.pad(
        torch.where(mask, lists, -1), (0, columns - lists.shape[1], 0, rows - lists.shape[0]), value=-1
    )
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    together = torch.stack(parts, 1).flatten(0, 1)
    return together.clamp_min(0), together >= 0


def _from_batch(batch: CascadeBatch, keys: Tensor, number: int) -> tuple[Drawn, Tensor]:
    """Draw from the lists of the batch; also return the draws as indices into the pool, 0 where masked."""
    size, mask = batch.item_id.numel(), batch.mask
    if may_read(batch.item_id) and not bool((batch.item_id >= VARIANT).any()):
        source = Occurrences.in_lists(batch.candidates, mask, size)
        drawn = draw_distinct(source, keys, batch.candidates, mask, number)
        return drawn, drawn.items
    # Several pool rows may be variants of one item: draw items, then point at one of its rows.
    item = _number_items(batch.item_id % VARIANT)
    row = torch.zeros_like(item).scatter_reduce_(0, item, torch.arange(size, device=item.device), "amax")
    own = item[batch.candidates]
    drawn = draw_distinct(Occurrences.in_lists(own, mask, size), keys, own, mask, number)
    return drawn, torch.where(drawn.mask, row[drawn.items], 0)


def _number_items(item_id: Tensor) -> Tensor:
    """Return the number of each id among the different ids in ascending order, without counting them on the host."""
    ordered, order = item_id.sort()
    number = torch.nn.functional.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
    return torch.empty_like(order).scatter_(0, order, number[: len(order)])
