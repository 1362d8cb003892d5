"""Joint training of all stages on the items that survive all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    CascadeObjective,
    ObjectiveOutput,
    Pool,
    Quotas,
    TermWeights,
    Weighting,
)
from recsys_topk.checks import check_not_negative
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.fused import law_of
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.numerics import is_full
from recsys_topk.operators.score_scale import squared_deviations
from recsys_topk.ops.losses.joint_terms import LAWS, JointTask, joint_losses, joint_terms, mean_terms


class JointObjective(CascadeObjective):
    """Cross-entropy of the membership of each stage, and of the probability of surviving all stages.

    L_m = top-k BCE of stage m; p_i = prod_m p_i^m is the probability of surviving all stages, and L_joint its
    cross-entropy with the true top k. total = sum_m [L_m exp(-w_m) / 2 + w_m / 2] + L_joint with learned
    log-variances w_m. All terms are computed from log p and log(1 - p), so that no probability is rounded to 0 or 1.

    Args:
        loss: A loss with an operator. Its k, if set, overrides the k of the call.
        stages: Number of stages.
        weighting: ``"learned"`` or ``"fixed"`` weights of the L_m.
        stage_k: The k of the operator in stage m: ``"k"``, the number of items wanted at the end of the cascade (as in
            the paper), or ``"quota"``, the number that the stage passes on.
        eps: Added to the probability inside every logarithm. LCRON's published loss is this objective with NeuralSort
            or SoftSort, eps = 1e-6 here and in the loss (``--objective.eps 1e-6 --loss.eps 1e-6``).
        pool: See `CascadeObjective`.
    """

    name = "joint"
    needs_operator = True
    takes_item_weights = True
    paper = "Wang et al. 2025, arXiv 2503.09492; Zhu et al. 2025, arXiv 2510.11472"

    def __init__(
        self,
        loss: RankingLoss,
        stages: int,
        *,
        weighting: Weighting = "learned",
        stage_k: Literal["k", "quota"] = "k",
        eps: float = 0.0,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(loss, stages, pool)
        self.eps = check_not_negative("eps", eps)
        if stage_k not in ("k", "quota"):
            raise ValueError(f"stage_k must be 'k' or 'quota', got {stage_k!r}")
        self.weights = TermWeights(stages, weighting)
        self.stage_k = stage_k

    def cuts(self, quotas: Sequence[int], k: int) -> list[int]:
        """See `CascadeObjective.cuts`. A list with at most k items has no term."""
        cuts = super().cuts(quotas, k)
        if self.stage_k == "k" or not cuts:
            return cuts
        return [max(cut, quota) for cut, quota in zip(cuts, quotas, strict=True)]

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int,
        weights: Tensor | None = None,
    ) -> ObjectiveOutput:  # fmt: skip
        """See `CascadeObjective.compute` and `compute_weighted`."""
        loss, operator = self.loss, self.loss.operator
        if operator is not None and operator.measures_tau:
            operator.observe(scores[0], torch.stack([squared_deviations(x, mask) for x in scores]).sum(0))
        real = None if is_full(mask) else mask
        wanted = None if loss.k == "positives" else loss.k if isinstance(loss.k, int) else k
        passed = None if self.stage_k == "k" else tuple(quotas)
        law = law_of(loss)
        if law is None or law.name not in LAWS or self.eps or labels.shape[1] < 2:
            law = None
        task = JointTask(labels, real, wanted, passed, loss.positive_above, law, weights)
        if law is None:
            means, joint = mean_terms(*joint_losses(scores, task, self._logs, self.eps))
        else:
            means, joint = joint_terms(scores, task)
        terms = list(means.unbind())
        return ObjectiveOutput.of_stages(self.weights(terms) + joint, terms, joint=joint)

    def _logs(self, scores: Tensor, k: Tensor, mask: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        operator = self.loss.operator
        assert operator is not None
        if weights is None:
            selection = operator.membership(scores, k, mask)
        else:
            selection = operator.weighted_membership(scores, k, mask, weights)
        if isinstance(self.loss, TopKLoss):
            selection = self.loss.clamp(selection)
        return selection.log_p, selection.log_q
