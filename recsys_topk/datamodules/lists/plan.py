"""The plan for preparing logged lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from recsys_topk.datamodules.lists.feedback import Feedback
from recsys_topk.datamodules.lists.labels import StageTable
from recsys_topk.datamodules.prepare.plan import PreparationPlan
from recsys_topk.tabular.tables.reader import TableReader

SplitRule = Literal["time", "fraction", "column", "files"]
SPLITS: Final = ("train", "val", "test")
COUNTS: Final = ("listed_before", "positive_before", "seconds_listed")
"""Columns that are counted in the requests before each request, for its items."""


@dataclass(frozen=True, kw_only=True)
class ListsPlan(PreparationPlan):
    """Describes which lists to prepare.

    Attributes:
        sources: The tables, one row per (request, item), and the split number of each; None = not assigned.
        stages: The labels of stages; None = labels come from a column.
        split: How to split the requests that no file and no column assigns.
        max_list_length: Maximum number of items of a list; the best labels are kept. None = all.
        duplicates: What to do with an item that occurs twice in a request.
        feedback: Events that raise labels; None = there are none.
        counted_above: Make the columns `COUNTS`; labels above this are positives. None = do not make them.
    """

    sources: Sequence[tuple[TableReader, int | None]]
    stages: StageTable | None
    split: SplitRule
    max_list_length: int | None = None
    duplicates: Literal["error", "best"] = "error"
    counted_above: float | None = None
    feedback: Feedback | None = None

    @property
    def advice(self) -> str:
        """What the user can do if a split is empty."""
        return {
            "time": "change val_fraction and test_fraction, or val_from and test_from",
            "fraction": "change val_fraction and test_fraction, or give more lists",
            "column": "the split column must have the values train, val and test",
            "files": "give a table with at least one list",
        }[self.split]

    def facts(self) -> dict[str, Any]:
        """See `PreparationPlan.facts`."""
        stages = self.stages
        return {
            **super().facts(),
            "sources": [(reader.fingerprint(), split) for reader, split in self.sources],
            "stages": None if stages is None else [stages.known, [vars(stage) for stage in stages.stages]],
            **{name: getattr(self, name) for name in ("split", "max_list_length", "duplicates")},
            **({} if self.feedback is None else {"feedback": self.feedback.facts()}),
            **({} if self.counted_above is None else {"counted_above": self.counted_above}),
        }
