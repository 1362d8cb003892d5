"""Every stage trained by itself, with any loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput, TermWeights, Weighting
from recsys_topk.losses.base import RankingLoss


class IndependentObjective(CascadeObjective):
    """total = sum over stages of the loss of that stage's scores; the stages do not see one another.

    Args:
        loss: Any loss.
        stages: Number of stages.
        weighting: ``"fixed"`` (1 each) or ``"learned"``.
    """

    name: ClassVar[str] = "independent"

    def __init__(self, loss: RankingLoss, stages: int, *, weighting: Weighting = "fixed") -> None:
        super().__init__(loss, stages)
        self.weights = TermWeights(stages, weighting)

    def compute(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor,
        groups: Tensor | None,
        quotas: Sequence[int],
        k: int,
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        cut = k if self.loss.requires_k and self.loss.k is None else None
        terms = [self.loss(x, labels, mask, k=cut) for x in scores]
        return ObjectiveOutput(self.weights(terms), {f"stage{m}": term for m, term in enumerate(terms)})
