"""Count the distinct ids of a stream in parts. Needs only numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recsys_topk.tabular.ids.keys import id_keys
from recsys_topk.types import Array


class IdCounter:
    """The distinct ids of a stream and the number of occurrences of each.

    Memory: about four times that of the distinct ids.

    Args:
        counting: Whether to count occurrences. False needs half the memory, and `min_count` must then be 1.

    Attributes:
        text: Whether any id was text that is not a decimal number.

    Example:
        >>> counter = IdCounter()
        >>> counter.add([3, 1, 3])
        >>> counter.add([3, 2])
        >>> counter.keys(min_count=2).tolist(), len(counter)
        ([3], 3)
    """

    def __init__(self, counting: bool = True) -> None:
        self.counting = counting
        self.text = False
        self._keys = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.int64)
        self._waiting: list[tuple[Array, Array]] = []
        self._waiting_size = 0

    def add(
        self, ids: npt.ArrayLike, counts: npt.ArrayLike | None = None, missing: npt.ArrayLike | None = None
    ) -> None:
        """Add ids, each once or `counts` times. Missing ids are ignored."""
        keys, absent, text = id_keys(ids, missing)
        self.text = self.text or text
        present = np.ones(keys.shape, dtype=bool) if absent is None else ~absent
        times = np.ones(keys.shape, dtype=np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        self._waiting.append(distinct_keys(keys[present], times[present] if self.counting else None))
        self._waiting_size += self._waiting[-1][0].size
        if self._waiting_size > max(1 << 20, self._keys.size):
            self._merge()

    def keys(self, min_count: int = 1) -> npt.NDArray[np.int64]:
        """Return the sorted keys of the ids that occur at least `min_count` times."""
        if min_count < 1 or (min_count > 1 and not self.counting):
            raise ValueError(f"min_count must be at least 1 (and 1 if nothing was counted), got {min_count}")
        self._merge()
        return self._keys if min_count == 1 else self._keys[self._counts >= min_count]

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of occurrences of each of `keys()`."""
        if not self.counting:
            raise ValueError("the occurrences were not counted; use IdCounter(counting=True)")
        self._merge()
        return self._counts

    def __len__(self) -> int:
        self._merge()
        return self._keys.size

    def _merge(self) -> None:
        if self._waiting:
            parts = [(self._keys, self._counts), *self._waiting]
            self._waiting, self._waiting_size = [], 0
            keys = np.concatenate([part[0] for part in parts])
            counts = np.concatenate([part[1] for part in parts]) if self.counting else None
            del parts
            self._keys, self._counts = distinct_keys(keys, counts)


def distinct_keys(keys: Array, counts: Array | None = None) -> tuple[Array, Array]:
    """Return the sorted distinct keys and the sums of their counts. The sums are empty if `counts` is None."""
    if not keys.size:
        return keys, np.empty(0, dtype=np.int64)
    if counts is None:
        keys = np.sort(keys)  # np.unique uses a hash table, which is 20 times slower for 10 million distinct keys
        return keys[np.r_[True, keys[1:] != keys[:-1]]], np.empty(0, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    return keys[starts], np.add.reduceat(counts[order], starts)
