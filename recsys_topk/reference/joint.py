"""The joint objective with the published treatment of padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recsys_topk.cascades.objectives.base import ObjectiveOutput
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.numerics import full_mask
from recsys_topk.operators.neuralsort import NeuralSort
from recsys_topk.operators.softsort import SoftSort
from recsys_topk.reference.lcron import lcron_terms


class PublishedJoint(JointObjective):
    """`JointObjective` as published: padded items compete and are trained on.

    With NeuralSort or SoftSort it is LCRON's loss in the dense form of its authors (`lcron_terms`); with any other
    operator the mask is ignored. Takes the arguments of `JointObjective`.
    """

    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the values as they are: padding takes part."""
        return values

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
        operator = self.loss.operator
        if not isinstance(operator, (NeuralSort, SoftSort)):
            return super().compute(scores, labels, full_mask(labels), groups, quotas, k)
        wanted = self.loss.k if isinstance(self.loss.k, int) else k
        terms, joint = lcron_terms(operator, scores, labels, mask, wanted, self.eps)
        return ObjectiveOutput.of_stages(self.weights(terms) + joint, terms, joint=joint)
