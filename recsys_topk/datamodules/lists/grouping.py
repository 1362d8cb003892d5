"""Make lists from the rows of a part: sort by request, find duplicates, limit the length, assign a split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.datamodules.lists.plan import SPLITS, ListsPlan
from recsys_topk.datamodules.prepare.ids import SourceIds
from recsys_topk.tabular.ids.keys import chained, mixed
from recsys_topk.tabular.tables.columns import one_chunk
from recsys_topk.types import Array


@dataclass(frozen=True)
class Grouped:
    """Some lists and their rows, which are ordered by list.

    Attributes:
        rows: The columns of the rows.
        start: Start of each list in `rows`.
        length: Length of each list.
        request: Request of each list.
        split: Split number of each list.
        time: Time of each list.
    """

    rows: Mapping[str, Any]
    start: Array
    length: Array
    request: Array
    split: Array
    time: Array

    @classmethod
    def of(cls, chunk: Mapping[str, Any]) -> Grouped:
        """Return the lists of a chunk of `ListMaker`."""
        lists = [np.asarray(chunk[f"lists.{name}"]) for name in ("start", "length", "request", "split", "time")]
        rows = {name.removeprefix("rows."): column for name, column in chunk.items() if name.startswith("rows.")}
        return cls(rows, *lists)

    def columns(self, names: Sequence[str], rows: Array) -> Any:
        """Return some columns of some rows as a pyarrow table."""
        return pa.table({name: self.rows[name].take(pa.array(rows)) for name in names})

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
        found: Array = np.repeat(self.start[lists], length) + inside
        return found


@dataclass(frozen=True)
class ListMaker:
    """Makes lists from all rows of some requests. It is the same for every engine.

    Attributes:
        plan: The rule of the split, the treatment of duplicates, and the maximum list length; without the tables.
        cuts: Times at which validation and testing begin.
        ids: The ids of requests and items that are text, for error messages.
    """

    plan: ListsPlan
    cuts: tuple[int, int] | None
    ids: Mapping[str, SourceIds]

    def __call__(self, table: Any) -> dict[str, Any]:
        """Return the lists of rows from `ListCleaner` (``lists.``), their rows (``rows.``), and counts (``counts.``).

        The rows have keys in place of ids.
        """
        request, item, label, split, time = (
            np.asarray(one_chunk(table.column(f"__{name}"))) for name in ("request", "item", "label", "split", "time")
        )
        order = np.lexsort((request, split))
        changed = (np.diff(request[order]) != 0) | (np.diff(split[order]) != 0)
        number = np.r_[0, np.cumsum(changed)]  # of the list of each row
        counts: dict[str, int] = {}
        if "item" in self.plan.roles:
            kept = self._without_duplicates(order, number, item, label, request)
            if kept.size < order.size:
                counts["repeated rows left out (duplicates: best)"] = order.size - kept.size
                order, number = order[kept], number[kept]
        most = self.plan.max_list_length
        if most is not None:
            kept = _longest(number, label[order], most)
            if kept.size < order.size:
                counts[f"items left out of lists longer than {most}"] = order.size - kept.size
                order, number = order[kept], number[kept]
        start = np.flatnonzero(np.r_[True, number[1:] != number[:-1]])
        length = np.diff(np.r_[start, order.size])
        requests, given = request[order[start]], split[order[start]]
        earliest = np.minimum.reduceat(time[order], start)
        if self.plan.split == "column":
            twice = np.flatnonzero(np.bincount(np.unique(requests, return_inverse=True)[1]) > 1)
            if twice.size:
                at = np.flatnonzero(requests == np.unique(requests)[twice[0]])
                names = " and ".join(SPLITS[each] for each in given[at])
                raise ValueError(
                    f"request {self._name('request', requests[at[0]])!r} is in {names}; a request belongs to one split"
                )
        counts["lists with one item"] = int((length == 1).sum())
        counts["lists without a label above 0"] = int((np.maximum.reduceat(label[order], start) <= 0).sum())
        rows = table.take(pa.array(order))
        return {
            "chunk.rows": np.array([table.num_rows]),
            "lists.start": start,
            "lists.length": length,
            "lists.request": requests,
            "lists.split": np.where(given >= 0, given, self._assigned(requests, earliest)),
            "lists.time": earliest,
            **{f"rows.{name}": rows.column(name) for name in rows.column_names},
            **{f"counts.{reason}": np.array([number]) for reason, number in counts.items()},
        }

    def _name(self, role: str, key: int) -> Any:
        """Return the id of a request or an item by its key."""
        return self.ids[role].names(np.array([key]))[0] if role in self.ids else int(key)

    def _assigned(self, request: Array, time: Array) -> Array:
        """Return the splits of requests that no file and no column assigns to a split."""
        if self.cuts is not None:
            later: Array = (time >= self.cuts[0]).astype(np.int8) + (time >= self.cuts[1])
            return later
        val, test = self.plan.fractions
        share = mixed(request, self.plan.split_seed + 101).astype(np.float64) / 2.0**64
        return np.where(share < test, 2, np.where(share < test + val, 1, 0)).astype(np.int8)

    def _without_duplicates(self, order: Array, number: Array, item: Array, label: Array, request: Array) -> Array:
        """Return which positions of `order` to keep, one per list and item: the best label, then the first row."""
        items = item[order]
        pairs = np.sort(chained([number, items], 0))
        if not (pairs[1:] == pairs[:-1]).any():  # different hashes are different pairs
            return np.arange(order.size)
        place = np.lexsort((-label[order], items, number))
        again = np.zeros(order.size, dtype=bool)
        again[1:] = (number[place][1:] == number[place][:-1]) & (items[place][1:] == items[place][:-1])
        if again.any() and self.plan.duplicates == "error":
            at = place[np.flatnonzero(again)[0]]
            raise ValueError(
                f"request {self._name('request', request[order[at]])!r} has the item {self._name('item', items[at])!r} "
                f"more than once (repeated rows in this part of the data: {int(again.sum())}); keep one row per "
                f"request and item, or use --data.duplicates best, which keeps the best label"
            )
        return np.sort(place[~again])


def _longest(number: Array, label: Array, most: int) -> Array:
    """Return which rows to keep: the best labels of each list, and the first rows among equal labels."""
    place = np.lexsort((-label, number))
    start = np.flatnonzero(np.r_[True, number[1:] != number[:-1]])
    rank = np.arange(number.size) - np.repeat(start, np.diff(np.r_[start, number.size]))
    return np.sort(place[rank < most])
