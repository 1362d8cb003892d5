"""The distinct ids of a source: sorted keys, and the ids themselves if they are text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recsys_topk.tabular.tables.columns import id_column, keys_of
from recsys_topk.types import Array


@dataclass(frozen=True)
class SourceIds:
    """Distinct ids.

    Attributes:
        keys: The keys (`columns.keys_of`), ascending.
        texts: The ids as text, in the order of the keys; None = every id is an integer, which is its key.

    Example:
        >>> ids = SourceIds.of(pa.array(["b", "7"]), pa.array([7, 8]))
        >>> sorted(ids.names()), SourceIds.of(pa.array([9, 7])).names()
        (['7', '8', 'b'], [7, 9])
    """

    keys: Array
    texts: Any = None

    @classmethod
    def of(cls, *columns: Any) -> SourceIds:
        """Return the distinct ids of pyarrow arrays without missing values."""
        found = [keys_of(column) for column in columns]
        keys, first = np.unique(np.concatenate([one.keys for one in found]), return_index=True)
        if not any(one.text for one in found):
            return cls(keys)
        texts = pa.concat_arrays([id_column(column).cast(pa.string()) for column in columns])
        return cls(keys, texts.take(pa.array(first)))

    def names(self, chosen: Array | None = None) -> list[Any]:
        """Return the ids: all, or those of some keys, all of which must exist."""
        at = slice(None) if chosen is None else np.searchsorted(self.keys, chosen)
        if self.texts is None:
            return list(self.keys[at].tolist())
        texts = self.texts if chosen is None else self.texts.take(pa.array(at))
        return list(texts.to_pylist())
