"""Independent training of every stage with any loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    CascadeObjective,
    ObjectiveOutput,
    Pool,
    Quotas,
    TermWeights,
    Weighting,
)
from recsys_topk.losses.base import RankingLoss


class IndependentObjective(CascadeObjective):
    """The sum over stages of the loss of each stage's scores. Stages do not influence each other.

    Args:
        loss: Any loss.
        stages: Number of stages.
        weighting: ``"fixed"`` (1 each) or ``"learned"``.
        stage_k: The k of stage m for a loss that does not set k: ``"k"``, the number of items wanted at the end of the
            cascade, or ``"quota"``, the number that the stage passes on; None = as in `RankingLoss.stage_k`.
        pool: See `CascadeObjective`. With `softmax`: the softmax over the weighted pool.
    """

    name = "independent"
    takes_item_weights = True
    separate_lists = True

    def __init__(
        self,
        loss: RankingLoss,
        stages: int,
        *,
        weighting: Weighting = "fixed",
        stage_k: Literal["k", "quota"] | None = None,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(loss, stages, pool)
        if stage_k not in ("k", "quota", None):
            raise ValueError(f"stage_k must be 'k', 'quota' or None, got {stage_k!r}")
        self.stage_k = loss.stage_k if stage_k is None else stage_k
        self.weights = TermWeights(stages, weighting)

    def cuts(self, quotas: Sequence[int], k: int) -> list[int]:
        """See `CascadeObjective.cuts`."""
        cuts = super().cuts(quotas, k)
        return list(quotas) if cuts and self.loss.k is None and self.stage_k == "quota" else cuts

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int,
        weights: Tensor | None = None,
    ) -> ObjectiveOutput:  # fmt: skip
        """See `CascadeObjective.compute` and `compute_weighted`."""
        cuts = self._open_cuts(quotas, k)
        terms = [self.loss(x, labels, mask, k=cut, item_weights=weights) for x, cut in zip(scores, cuts, strict=True)]
        return ObjectiveOutput.of_stages(self.weights(terms), terms)

    def compute_separately(
        self, scores: Sequence[Tensor], labels: Sequence[Tensor], masks: Sequence[Tensor], quotas: Sequence[int], k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute_separately`."""
        cuts = self._open_cuts(quotas, k)
        terms = [self.loss(x, y, mask, k=cut) for x, y, mask, cut in zip(scores, labels, masks, cuts, strict=True)]
        return ObjectiveOutput.of_stages(self.weights(terms), terms)

    def _open_cuts(self, quotas: Quotas, k: int) -> Sequence[int | None]:
        """Return the k of each stage for a loss that requires k and does not set it; None otherwise."""
        return self.cuts(quotas, k) if self.loss.requires_k and self.loss.k is None else [None] * self.stages
