"""The quota of each stage, solved in the pool of items that the deployed stage selects from."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput, Pool, Quotas
from recsys_topk.checks import check_positive
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.numerics import weighted_mean
from recsys_topk.operators.base import TopKOperator
from recsys_topk.operators.score_scale import squared_deviations


class QuotaObjective(CascadeObjective):
    """The negative log-probability that the positives survive, with the quotas of the stages in the deployed pool.

    A training list has the logged items and a few sampled negatives; a deployed stage selects from many more. A sampled
    negative stands for w_i items of the pool (`recsys_topk.cascades.sampled_negatives.pool_weights`), a logged item for
    itself. p_i^m is the membership of item i in stage m, at the threshold where sum_i w_i p_i^m = quota_m, and

        L_m = mean over the positives i of -log p_i^m,  total = sum_m L_m.

    The total is the negative logarithm of prod_m p_i^m, the probability of surviving all stages, averaged over the
    positives. The threshold pushes the other items down: its gradient distributes what the positives gain over all
    items. Labels: binary. For small memberships p_i is proportional to exp(x_i / tau) under the logistic law, so L_m
    tends to a softmax over the weighted pool.

    Args:
        loss: A loss with an operator that sums to k and takes item weights, e.g. `sigmoid` or `lapsum`. Only its
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
        operator = loss.operator
        assert operator is not None
        if tau is not None and (isinstance(tau, (int, float)) or len(tau) != stages):
            raise ValueError(
                f"tau must be one number per stage, {stages} in all, got {tau!r}; --loss.tau sets one for all stages"
            )
        # A tuple: these copies have no state, and the operator of the loss is registered already.
        self.operators = (operator,) * stages if tau is None else tuple(_at(operator, one) for one in tau)

    def cuts(self, quotas: Sequence[int], k: int) -> list[int]:
        """See `CascadeObjective.cuts`."""
        if self.loss.k == "positives":
            return []
        return [self.loss.k] * self.stages if isinstance(self.loss.k, int) else list(quotas)

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`. All items have weight 1."""
        return self._output(scores, labels, mask, quotas, k, None)

    def compute_weighted(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, quotas: Quotas, k: int, weights: Tensor
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute_weighted`."""
        valid = mask & (weights > 0)
        return self._output(scores, labels, valid, quotas, k, torch.where(valid, weights, 0.0))

    def _output(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, quotas: Quotas, k: int, weights: Tensor | None
    ) -> ObjectiveOutput:
        for operator in dict.fromkeys(self.operators):
            if operator.measures_tau:
                operator.observe(scores[0], torch.stack([squared_deviations(x, mask) for x in scores]).sum(0))
        w = mask.to(labels.dtype) if weights is None else weights
        true = torch.where(labels > self.loss.positive_above, w, 0.0)
        gain, amount = true.sum(1), w.sum(1)
        cuts: Sequence[Tensor | int] = self.cuts(quotas, k) or [gain.long() if weights is None else gain] * self.stages
        terms = []
        for x, operator, cut in zip(scores, self.operators, cuts, strict=True):
            if weights is None:
                selection = operator.membership(x, cut, mask)
            else:
                selection = operator.weighted_membership(x, cut, mask, weights)
            if isinstance(self.loss, TopKLoss):
                selection = self.loss.clamp(selection)
            counted = (gain > 0) & (cut < amount)
            chosen = torch.where((true > 0) & counted[:, None], selection.log_p, 0.0)
            terms.append(weighted_mean(-(chosen * true).sum(1) / torch.where(counted, gain, 1.0), counted))
        return ObjectiveOutput.of_stages(torch.stack(terms).sum(), terms)


def _at(operator: TopKOperator, tau: float) -> TopKOperator:
    """Return a copy of the operator with a fixed temperature."""
    made = copy.deepcopy(operator)
    made.tau, made.measures_tau, made.tau_state = check_positive("tau", tau), False, None
    return made
