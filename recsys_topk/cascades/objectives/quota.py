"""The quota of each stage, solved in the pool of items that the deployed stage selects from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput, Pool, Quotas
from recsys_topk.checks import check_positive
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.fused import law_of
from recsys_topk.numerics import is_full
from recsys_topk.operators.score_scale import squared_deviations
from recsys_topk.ops.losses.topk_loss import topk_loss


class QuotaObjective(CascadeObjective):
    """The negative log-probability that the positives survive, with the quotas of the stages in the deployed pool.

    A training list has the logged items and a few sampled negatives; a deployed stage selects from many more. A sampled
    negative stands for w_i items of the pool (`recsys_topk.cascades.sampled_negatives.pool_weights`), a logged item for
    itself. p_i^m is the membership of item i in stage m, at the threshold where sum_i w_i p_i^m = quota_m, and

        L_m = mean over the positives i of -log p_i^m,  total = sum_m L_m.

    The total is the negative logarithm of prod_m p_i^m, the probability of surviving all stages, averaged over the
    positives. The threshold pushes the other items down: its gradient distributes what the positives gain over all
    items. Labels: binary; if there are more positives than the quota, those with the largest labels count. For small
    memberships p_i is proportional to exp(x_i / tau) under the logistic law, so L_m tends to a softmax over the
    weighted pool.

    Args:
        loss: A loss of an operator that sums to k and takes item weights, e.g. `sigmoid` or `lapsum`. Only its
            operator is used. Its k, if set, replaces the quotas.
        stages: Number of stages.
        pool: Number of items that the deployed cascade selects from, besides the logged ones: an int, or
            ``"catalogue"``, all items of the training shard.
        tau: One temperature per stage, first stage first; None = that of the loss for all stages.
    """

    name = "quota"
    needs_operator = True
    needs_sum = True
    takes_item_weights = True

    def __init__(
        self, loss: RankingLoss, stages: int, *, pool: Pool = "catalogue", tau: Sequence[float] | None = None
    ) -> None:
        super().__init__(loss, stages, pool)
        if law_of(loss) is None:
            raise ValueError(
                f"the {self.name!r} objective needs the cross-entropy of an operator with a law, got {loss.name!r}; "
                f"use --loss sigmoid or --loss lapsum"
            )
        if tau is not None and (isinstance(tau, (int, float)) or len(tau) != stages):
            raise ValueError(
                f"tau must have one number per stage, {stages} in all, got {tau!r}; --loss.tau sets one for all stages"
            )
        self.taus = None if tau is None else tuple(check_positive("tau", value) for value in tau)

    def cuts(self, quotas: Sequence[int], k: int) -> list[int]:
        """See `CascadeObjective.cuts`."""
        if self.loss.k == "positives":
            return []
        return [self.loss.k] * self.stages if isinstance(self.loss.k, int) else list(quotas)

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int,
        weights: Tensor | None = None,
    ) -> ObjectiveOutput:  # fmt: skip
        """See `CascadeObjective.compute` and `compute_weighted`."""
        operator = self.loss.operator
        if operator is not None and operator.measures_tau and self.taus is None:
            operator.observe(scores[0], torch.stack([squared_deviations(x, mask) for x in scores]).sum(0))
        real = None if is_full(mask) else mask
        if labels.shape[1] < 2:  # the operation needs two items
            width = (0, 2)
            real, scores, labels = pad(mask, width, value=False), [pad(x, width) for x in scores], pad(labels, width)
            weights = None if weights is None else pad(weights, width)
        law = law_of(self.loss)
        assert law is not None
        law = law._replace(others=0.0)
        laws = [law] * self.stages if self.taus is None else [law._replace(tau=tau) for tau in self.taus]
        cuts: Sequence[int | None] = self.cuts(quotas, k) or [None] * self.stages
        above = self.loss.positive_above
        terms = [
            topk_loss(x, labels, real, cut, above, stage_law, True, weights)[0]
            for x, cut, stage_law in zip(scores, cuts, laws, strict=True)
        ]
        return ObjectiveOutput.of_stages(torch.stack(terms).sum(), terms)
