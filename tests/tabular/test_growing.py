"""Vocabularies that grow from part to part, against dictionaries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recsys_topk.tabular.ids.growing import GrowingVocabulary
from recsys_topk.tabular.ids.options import VocabularyOptions
from recsys_topk.tabular.ids.vocabulary import (
    CompactVocabulary,
    Vocabulary,
    fit_vocabulary,
    load_vocabularies,
    save_vocabularies,
)


class ByDict:
    """The rows of ids by the definition."""

    def __init__(self, min_count: int, evict_after: int) -> None:
        self.min_count, self.evict_after = min_count, evict_after
        self.count: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.longest = 2

    def add(self, ids: list[int], part: int) -> set[int]:
        """Add a part; return the rows that got an id."""
        for one in ids:
            self.count[one] = self.count.get(one, 0) + 1
            self.seen[one] = part
        for one in [one for one, last in self.seen.items() if self.evict_after and part - last >= self.evict_after]:
            del self.count[one], self.seen[one]
            self.row.pop(one, None)
        given = set()
        for one in sorted(self.count):
            if self.count[one] >= self.min_count and one not in self.row:
                self.row[one] = next(row for row in range(2, 10**6) if row not in self.row.values())
                given.add(self.row[one])
                self.longest = max(self.longest, self.row[one] + 1)
        return given


@pytest.mark.parametrize(("min_count", "evict_after"), [(1, 0), (3, 0), (2, 2), (1, 1)])
def test_rows_equal_a_dictionary(min_count: int, evict_after: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(min_count)
    options = VocabularyOptions.parse(f"growing:min_count={min_count},evict_after={evict_after}")
    plain = ByDict(min_count, evict_after)
    vocabulary: Vocabulary | None = None
    for part in range(8):
        ids = (generator.zipf(1.5, 60) % 50 + 3 * part - 20).tolist()
        given, after = plain.add(ids, part), fit_vocabulary(options, ids)
        if vocabulary is not None:
            after = vocabulary.grow(after)
            assert set(after.new_rows(vocabulary).tolist()) == given
        save_vocabularies(tmp_path / str(part), {"item": after})
        vocabulary = load_vocabularies(tmp_path / str(part))["item"]  # a memory-mapped one grows too
        assert vocabulary == after
        asked = list(range(-30, 60))
        assert vocabulary.encode(asked).tolist() == [plain.row.get(one, 1) for one in asked]
        assert vocabulary.known(asked).tolist() == [one in plain.row for one in asked]
        assert vocabulary.rows == plain.longest


def test_other_vocabularies_and_missing_ids_do_not_change() -> None:
    compact = CompactVocabulary.fit([1, 2])
    growing = GrowingVocabulary.fit(["a", "b", "b"], min_count=2)
    assert compact.grow(CompactVocabulary.fit([3])) is compact
    assert not compact.new_rows(compact).size
    assert growing.grow(growing).encode(["a", "b", None]).tolist() == [3, 2, 0]


def test_mistakes_in_options_are_named() -> None:
    with pytest.raises(ValueError, match="growing takes min_count, evict_after, got 'rows'"):
        VocabularyOptions.parse("growing:rows=7")
    with pytest.raises(ValueError, match="evict_after must not be negative"):
        VocabularyOptions.parse("growing:evict_after=-1")
