"""What the preparation of a source needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recsys_topk.tabular.features.description import Description
from recsys_topk.tabular.features.encoder import FeatureEncoder


@dataclass(frozen=True, kw_only=True)
class PreparationPlan:
    """The parts of a plan that all sources have.

    Attributes:
        name: The name of the data in messages.
        roles: The column of each role: user, item, time etc.
        features: The description of the features (to be fitted), or a fitted encoder.
        fractions: Shares for validation and testing, where the data do not say it.
        dates: Microseconds at which validation and testing begin; None = by `fractions`.
        split_seed: Seed of the random part of the split.
    """

    name: str
    roles: Mapping[str, str]
    features: Description | FeatureEncoder
    fractions: tuple[float, float]
    dates: tuple[int, int] | None = None
    split_seed: int = 0

    @property
    def description(self) -> Description:
        """The description of the features."""
        return self.features.description if isinstance(self.features, FeatureEncoder) else self.features

    def facts(self) -> dict[str, Any]:
        """Return plain values that change whenever the prepared content changes."""
        encoder = self.features if isinstance(self.features, FeatureEncoder) else None
        return {
            "roles": dict(self.roles),
            "features": self.description.to_plain(),
            "vocabularies": encoder and [own.fingerprint for own in encoder.vocabularies.values()],
            "states": encoder and encoder.states,
            "fractions": self.fractions,
            "dates": self.dates,
            "split_seed": self.split_seed,
        }
