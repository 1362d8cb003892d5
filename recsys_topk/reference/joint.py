"""The joint objective and LCRON's loss with the published treatment of padding; for comparisons only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import ObjectiveOutput, Quotas
from recsys_topk.cascades.objectives.joint import JointObjective
from recsys_topk.numerics import full_mask, mean_of_lists
from recsys_topk.operators.neuralsort import NeuralSort
from recsys_topk.operators.softsort import SoftSort


def permutation(operator: NeuralSort | SoftSort, scores: Tensor) -> Tensor:
    """Return the relaxed permutation matrix of unmasked lists, (B, rank, item)."""
    n = scores.shape[1]
    if isinstance(operator, SoftSort):
        ordered = scores.sort(1, descending=True).values
        return torch.softmax(-(ordered[:, :, None] - scores[:, None, :]).abs() / operator.tau, -1)
    distance = (scores[:, :, None] - scores[:, None, :]).abs().sum(2)
    slope = n + 1 - 2 * torch.arange(1, n + 1, device=scores.device, dtype=scores.dtype)
    return torch.softmax((slope[:, None] * scores[:, None, :] - distance[:, None, :]) / operator.tau, -1)


def lcron_terms(
    operator: NeuralSort | SoftSort, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, k: int, eps: float
) -> tuple[list[Tensor], Tensor]:
    """Return the term of each stage and the joint term, from one (B, N) tensor of scores per stage.

    The true items are the k largest labels (including padding) that are not padding; k is also the cut-off of every
    stage. eps is added inside each logarithm and to each normaliser.
    """
    real = mask.to(labels.dtype)
    both = real[:, :, None] * real[:, None, :]
    order = labels.argsort(dim=1, descending=True, stable=True)
    truth = torch.nn.functional.one_hot(order, labels.shape[1]).to(labels.dtype) * both
    wanted, unwanted = truth[:, :k].sum(1), truth[:, k:].sum(1)
    long_enough = (mask.sum(1) > k).to(labels.dtype)
    terms: list[Tensor] = []
    inside, outside = torch.ones_like(labels), torch.ones_like(labels)
    for x in scores:
        p = permutation(operator, x) * both
        up, down = p[:, :k].sum(1), p[:, k:].sum(1)
        whole = (up + down).detach() + eps
        u, d = up / whole, down / whole
        both_sides = -(wanted * torch.log(u + eps) + unwanted * torch.log(d + eps)) * real
        terms.append(mean_of_lists(both_sides.mean(1) * long_enough))
        inside, outside = inside * u, outside * (1.0 - d)
    kept = -torch.log(inside + eps) * wanted
    dropped = -torch.log(1.0 - outside + eps) * (1.0 - wanted).clamp(0.0, 1.0)
    return terms, mean_of_lists((kept + dropped).mean(1))


class PublishedJoint(JointObjective):
    """`JointObjective` as published, with the same arguments: padding takes part in the loss.

    With NeuralSort or SoftSort this is LCRON's loss in the dense form of its authors (`lcron_terms`). With any other
    operator the mask is ignored.
    """

    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the values unchanged, because padding takes part in the loss."""
        return values

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int,
        weights: Tensor | None = None,
    ) -> ObjectiveOutput:  # fmt: skip
        """See `CascadeObjective.compute`."""
        operator = self.loss.operator
        if weights is not None or not isinstance(operator, (NeuralSort, SoftSort)):
            real = full_mask(labels) if weights is None else mask
            return super().compute(scores, labels, real, groups, quotas, k, weights)
        wanted = self.loss.k if isinstance(self.loss.k, int) else k
        terms, joint = lcron_terms(operator, scores, labels, mask, wanted, self.eps)
        return ObjectiveOutput.of_stages(self.weights(terms) + joint, terms, joint=joint)
