"""The joint objective with the published treatment of padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    ObjectiveOutput,
    Quotas,
)
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.numerics import full_mask
from recsys_topk.operators.neuralsort import NeuralSort
from recsys_topk.operators.softsort import SoftSort
from recsys_topk.reference.lcron import lcron_terms


class PublishedJoint(JointObjective):
    """`JointObjective` as published, with the same arguments: padding takes part in the loss.

    With NeuralSort or SoftSort this is LCRON's loss in the dense form of its authors (`lcron_terms`). With any other
    operator the mask is ignored.
    """

    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the values unchanged, because padding takes part in the loss."""
        return values

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        operator = self.loss.operator
        if not isinstance(operator, (NeuralSort, SoftSort)):
            return super().compute(scores, labels, full_mask(labels), groups, quotas, k)
        wanted = self.loss.k if isinstance(self.loss.k, int) else k
        terms, joint = lcron_terms(operator, scores, labels, mask, wanted, self.eps)
        return ObjectiveOutput.of_stages(self.weights(terms) + joint, terms, joint=joint)
