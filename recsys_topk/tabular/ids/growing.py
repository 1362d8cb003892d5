"""A vocabulary that grows from part to part of a stream. The rows of the ids that it has do not change."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from recsys_topk.tabular.ids.counter import IdCounter
from recsys_topk.tabular.ids.vocabulary import Vocabulary
from recsys_topk.types import Array

UNKNOWN: Final = 1
"""The row of ids that have no row."""

KEY, ROW, COUNT, SEEN = range(4)


class GrowingVocabulary(Vocabulary):
    """One row for each id that occurred at least `min_count` times so far. All other ids share the row 1.

    `grow` returns the vocabulary of the next part of a stream. An id keeps its row for as long as it is in the
    vocabulary. Rows of evicted ids are given to new ids first; then the table gets longer. Memory: 32 bytes per id,
    including ids that are too rare for a row.

    Args:
        table: (4, n) int64: the sorted keys of the ids, their rows (0 = none yet), their counts, and the part in
            which each was seen last.
        rows: Number of rows of the table.
        min_count: Ids that occurred less often have no row.
        evict_after: Ids that were not seen in so many parts lose their row and their count; 0 = never.
        part: Number of the newest part.

    Example:
        >>> first = GrowingVocabulary.fit([7, 7, 9], min_count=2)
        >>> second = first.grow(GrowingVocabulary.fit([9, 3, 3], min_count=2))
        >>> first.encode([3, 7, 9]).tolist(), second.encode([3, 7, 9]).tolist(), second.rows
        ([1, 2, 1], [3, 2, 4], 5)
    """

    kind = "growing"

    def __init__(self, table: Array, rows: int, min_count: int = 1, evict_after: int = 0, part: int = 0) -> None:
        self.table, self.rows = table, int(rows)
        self.min_count, self.evict_after, self.part = int(min_count), int(evict_after), int(part)

    @classmethod
    def fit(cls, ids: npt.ArrayLike | IdCounter, *, min_count: int = 1, evict_after: int = 0) -> GrowingVocabulary:
        """Return the vocabulary of the first part.

        Args:
            ids: The ids with repetitions, or a counter of the ids.
            min_count: Number of occurrences from which an id has a row.
            evict_after: Number of parts after which an id that was not seen loses its row; 0 = never.
        """
        if not isinstance(ids, IdCounter):
            counter = IdCounter()
            counter.add(ids)
            ids = counter
        keys, counts = ids.keys(), ids.counts()
        table = np.stack([keys, np.zeros_like(keys), counts, np.zeros_like(keys)])
        return cls(table, UNKNOWN + 1, min_count, evict_after)._with_new_rows()

    def grow(self, part: Vocabulary) -> GrowingVocabulary:
        """Return the vocabulary after one more part, given the vocabulary of that part alone (`fit`)."""
        assert isinstance(part, GrowingVocabulary)
        keys = np.union1d(self.table[KEY], part.table[KEY])
        table = np.zeros((4, keys.size), dtype=np.int64)
        table[KEY] = keys
        before, now = np.searchsorted(keys, self.table[KEY]), np.searchsorted(keys, part.table[KEY])
        table[ROW:, before] = self.table[ROW:]
        table[COUNT, now] += part.table[COUNT]
        table[SEEN, now] = self.part + 1
        if self.evict_after:
            table = table[:, self.part + 1 - table[SEEN] < self.evict_after]
        return GrowingVocabulary(table, self.rows, self.min_count, self.evict_after, self.part + 1)._with_new_rows()

    def new_rows(self, before: Vocabulary) -> npt.NDArray[np.int64]:
        """Return the rows that hold another id than in an earlier vocabulary of the stream."""
        keys, rows = self.table[: ROW + 1, self.table[ROW] > 0]
        return np.sort(rows[before._rows_of(keys) != rows])

    @property
    def keys(self) -> Array:
        """The content of the vocabulary, (4, n) int64; see the argument `table`."""
        return self.table

    def describe(self) -> str:
        """Return the number of ids with and without a row."""
        taken = int((self.table[ROW] > 0).sum())
        return f"growing, {taken:,} ids + {self.table.shape[1] - taken:,} too rare for a row, part {self.part + 1}"

    def options(self) -> dict[str, int]:
        """Return the numbers that define the vocabulary, without its ids."""
        return {"min_count": self.min_count, "evict_after": self.evict_after, "part": self.part}

    def _with_new_rows(self) -> GrowingVocabulary:
        """Give a row to each id that is frequent enough and has none, in the order of their keys."""
        new = np.flatnonzero((self.table[ROW] == 0) & (self.table[COUNT] >= self.min_count))
        free = np.setdiff1d(np.arange(UNKNOWN + 1, self.rows + new.size), self.table[ROW])[: new.size]
        self.table[ROW, new] = free
        self.rows = max(self.rows, int(free.max(initial=0)) + 1)
        return self

    def _rows_of(self, keys: Array) -> npt.NDArray[np.int64]:
        if not self.table.shape[1]:
            return np.full(keys.shape, UNKNOWN, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.table[KEY], keys), self.table.shape[1] - 1)
        row = np.where(self.table[KEY, at] == keys, self.table[ROW, at], 0)
        return np.where(row > 0, row, UNKNOWN)

    def _known(self, keys: Array) -> npt.NDArray[np.bool_]:
        return np.asarray(self._rows_of(keys) != UNKNOWN)
