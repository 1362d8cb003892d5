"""Make lists from the rows of a part: sort by request, find duplicates, limit the length, assign a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.plan import SPLITS, ListsPlan
from recsys_topk.tabular.ids.keys import chained, mixed
from recsys_topk.tabular.tables.columns import one_chunk
from recsys_topk.types import Array


@dataclass(frozen=True)
class Grouped:
    """The lists of a part.

    Attributes:
        rows: The rows of all lists, one list after the other.
        start: Start of each list in `rows`.
        length: Length of each list.
        request: Request of each list.
        split: Split number of each list.
        order_key: Sort key of the requests: their time.
        counts: Counts to report, by reason.
    """

    rows: Array
    start: Array
    length: Array
    request: Array
    split: Array
    order_key: Array
    counts: dict[str, int]

    def taken(self, table: Any) -> tuple[Any, Grouped]:
        """Return the rows of a table in the order of the lists, and the lists of the new table."""
        return table.take(pa.array(self.rows)).combine_chunks(), replace(self, rows=np.arange(self.rows.size))

    @property
    def first(self) -> Array:
        """The first row of each list."""
        found: Array = self.rows[self.start]
        return found

    def chunks(self, split: int, rows: int) -> Iterator[Array]:
        """Yield the numbers of the lists of a split, in chunks of about `rows` rows."""
        own = np.flatnonzero(self.split == split)
        if own.size:
            piece = (np.cumsum(self.length[own]) - 1) // rows
            yield from np.split(own, np.flatnonzero(np.diff(piece)) + 1)

    def rows_of(self, lists: Array) -> Array:
        """Return the rows of some lists, one list after the other."""
        length = self.length[lists]
        inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        found: Array = self.rows[np.repeat(self.start[lists], length) + inside]
        return found


def group_rows(table: Any, plan: ListsPlan, cuts: tuple[int, int] | None, name: Callable[[str, int], Any]) -> Grouped:
    """Return the lists of the rows of a part.

    Args:
        table: Rows from `ListCleaner`, with keys in place of ids.
        plan: The rule of the split, the treatment of duplicates, and the maximum list length.
        cuts: Times at which validation and testing begin.
        name: Returns the id of a request or an item by its role and key, for error messages.
    """
    request, item, label, split, time = (
        np.asarray(one_chunk(table.column(f"__{name}"))) for name in ("request", "item", "label", "split", "time")
    )
    order = np.lexsort((request, split))
    number = _numbers(request[order], split[order])
    counts: dict[str, int] = {}
    if "item" in plan.roles:
        kept = _without_duplicates(order, number, item, label, request, plan, name)
        if kept.size < order.size:
            counts["repeated rows left out (duplicates: best)"] = order.size - kept.size
            order, number = order[kept], number[kept]
    if plan.max_list_length is not None:
        kept = _longest(number, label[order], plan.max_list_length)
        if kept.size < order.size:
            counts[f"items left out of lists longer than {plan.max_list_length}"] = order.size - kept.size
            order, number = order[kept], number[kept]
    start = np.flatnonzero(np.r_[True, number[1:] != number[:-1]]) if order.size else np.empty(0, dtype=np.int64)
    length = np.diff(np.r_[start, order.size])
    requests, given = request[order[start]], split[order[start]]
    earliest = np.minimum.reduceat(time[order], start) if start.size else time[:0]
    if plan.split == "column":
        twice = np.flatnonzero(np.bincount(np.unique(requests, return_inverse=True)[1]) > 1)
        if twice.size:
            at = np.flatnonzero(requests == np.unique(requests)[twice[0]])
            names = " and ".join(SPLITS[each] for each in given[at])
            raise ValueError(
                f"request {name('request', requests[at[0]])!r} is in {names}; a request belongs to one split"
            )
    found = np.where(given >= 0, given, _assigned(requests, earliest, plan, cuts))
    best = np.maximum.reduceat(label[order], start) if start.size else label[:0]
    counts["lists with one item"] = int((length == 1).sum())
    counts["lists without a label above 0"] = int((best <= 0).sum())
    return Grouped(order, start, length, requests, found, earliest, counts)


def _numbers(request: Array, split: Array) -> Array:
    """Return the list number of each row; rows are sorted."""
    if not request.size:
        return np.empty(0, dtype=np.int64)
    changed = (request[1:] != request[:-1]) | (split[1:] != split[:-1])
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(changed)])


def _assigned(request: Array, time: Array, plan: ListsPlan, cuts: tuple[int, int] | None) -> Array:
    """Return the splits of requests that no file and no column assigns to a split."""
    if cuts is not None:
        later: Array = (time >= cuts[0]).astype(np.int8) + (time >= cuts[1])
        return later
    val, test = plan.fractions
    share = mixed(request, plan.split_seed + 101).astype(np.float64) / 2.0**64
    return np.where(share < test, 2, np.where(share < test + val, 1, 0)).astype(np.int8)


def _without_duplicates(
    order: Array,
    number: Array,
    item: Array,
    label: Array,
    request: Array,
    plan: ListsPlan,
    name: Callable[[str, int], Any],
) -> Array:
    """Return which positions of `order` to keep, one per list and item: the best label, then the first row."""
    items = item[order]
    pairs = np.sort(chained([number, items], 0))
    if not (pairs[1:] == pairs[:-1]).any():  # different hashes are different pairs
        return np.arange(order.size)
    place = np.lexsort((-label[order], items, number))
    again = np.zeros(order.size, dtype=bool)
    again[1:] = (number[place][1:] == number[place][:-1]) & (items[place][1:] == items[place][:-1])
    if not again.any():
        return np.arange(order.size)
    if plan.duplicates == "error":
        at = place[np.flatnonzero(again)[0]]
        raise ValueError(
            f"request {name('request', request[order[at]])!r} has the item {name('item', items[at])!r} more than once "
            f"(repeated rows in this part of the data: {int(again.sum())}); keep one row per request and item, or use "
            f"--data.duplicates best, which keeps the best label"
        )
    return np.sort(place[~again])


def _longest(number: Array, label: Array, most: int) -> Array:
    """Return which rows to keep: the best labels of each list, and the first rows among equal labels."""
    place = np.lexsort((-label, number))
    start = np.flatnonzero(np.r_[True, number[1:] != number[:-1]])
    rank = np.arange(number.size) - np.repeat(start, np.diff(np.r_[start, number.size]))
    return np.sort(place[rank < most])
