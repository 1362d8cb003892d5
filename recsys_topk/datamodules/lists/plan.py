"""The plan for preparing logged lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from recsys_topk.datamodules.lists.labels import StageTable
from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.encoder import FeatureEncoder
from recsys_topk.tabular.tables.reader import TableReader

SplitRule = Literal["time", "fraction", "column", "files"]
SPLITS: Final = ("train", "val", "test")


@dataclass(frozen=True)
class Plan:
    """Describes what to prepare.

    Attributes:
        sources: The tables, one row per (request, item), and the split number of each; None = not assigned.
        roles: The column of each role.
        stages: The labels of stages; None = labels come from a column.
        features: The description of the features (to be fitted), or a fitted encoder.
        split: How to split the requests that no file and no column assigns.
        fractions: Shares of those requests for validation and testing.
        dates: Microseconds at which validation and testing begin; None = by `fractions`.
        split_seed: Seed of the split by fraction.
        max_list_length: Maximum number of items of a list; the best labels are kept. None = all.
        duplicates: What to do with an item that occurs twice in a request.
    """

    sources: Sequence[tuple[TableReader, int | None]]
    roles: Mapping[str, str]
    stages: StageTable | None
    features: Description | FeatureEncoder
    split: SplitRule
    fractions: tuple[float, float]
    dates: tuple[int, int] | None = None
    split_seed: int = 0
    max_list_length: int | None = None
    duplicates: Literal["error", "best"] = "error"

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        return self.sources[0][0].name

    @property
    def description(self) -> Description:
        """The description of the features."""
        return self.features.description if isinstance(self.features, FeatureEncoder) else self.features

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
        """Return plain values that change whenever the prepared content changes."""
        features, stages = self.features, self.stages
        encoder = features if isinstance(features, FeatureEncoder) else None
        names = ("split", "fractions", "dates", "split_seed", "max_list_length", "duplicates")
        return {
            "sources": [(reader.fingerprint(), split) for reader, split in self.sources],
            "roles": dict(self.roles),
            "stages": None if stages is None else [stages.known, [vars(stage) for stage in stages.stages]],
            "features": self.description.to_plain(),
            "vocabularies": encoder and [own.fingerprint for own in encoder.vocabularies.values()],
            "states": encoder and encoder.states,
            **{name: getattr(self, name) for name in names},
        }
