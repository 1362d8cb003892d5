"""Joint training of all stages on the items that survive all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

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
from recsys_topk.losses.fused import fused_joint_terms
from recsys_topk.losses.topk import TopKLoss, selection_bce
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import add_eps, is_full
from recsys_topk.operators.base import SoftSelection
from recsys_topk.operators.score_scale import squared_deviations
from recsys_topk.ops.losses.survival import survival_logs
from recsys_topk.ops.losses.topk_target import topk_target
from recsys_topk.processes import divisor


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
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        fused = self._fused(scores, labels, mask, quotas, k, None)
        if fused is not None:
            return fused
        valid = mask.sum(-1)
        list_k = self._list_k(mask & (labels > self.loss.positive_above), valid, k)
        target = topk_target(labels, mask, list_k.clamp_min(1), self.loss.positive_above) > 0
        return self._output(scores, _Lists(labels, mask, None, target, list_k, valid), quotas)

    def compute_weighted(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, quotas: Quotas, k: int, weights: Tensor
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute_weighted`."""
        fused = self._fused(scores, labels, mask, quotas, k, weights)
        if fused is not None:
            return fused
        valid = mask & (weights > 0)
        w = torch.where(valid, weights, 0.0)
        list_k = self._list_k(torch.where(labels > self.loss.positive_above, w, 0.0), w.sum(-1), k)
        target = true_items(labels, valid, list_k, self.loss.positive_above, w)
        return self._output(scores, _Lists(labels, valid, w, target, list_k, w.sum(-1)), quotas)

    def _fused(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, quotas: Quotas, k: int, weights: Tensor | None
    ) -> ObjectiveOutput | None:
        operator = self.loss.operator
        if operator is not None and operator.measures_tau:
            operator.observe(scores[0], torch.stack([squared_deviations(x, mask) for x in scores]).sum(0))
        real = None if is_full(mask) else mask
        passed = None if self.stage_k == "k" else tuple(quotas)
        fused = None if self.eps else fused_joint_terms(self.loss, scores, labels, real, k, passed, weights)
        if fused is None:
            return None
        terms, joint = list(fused[0].unbind()), fused[1]
        return ObjectiveOutput.of_stages(self.weights(terms) + joint, terms, joint=joint)

    def _output(self, scores: Sequence[Tensor], lists: _Lists, quotas: Quotas) -> ObjectiveOutput:
        labels, mask, _, _, list_k, amount = lists
        counted = (mask & (labels > self.loss.positive_above)).any(-1) & (list_k > 0) & (list_k < amount)
        cuts = [list_k if self.stage_k == "k" else torch.full_like(amount, quota) for quota in quotas]
        selections = [
            _only(self._select(x, cut, lists), counted & (cut < amount)) for x, cut in zip(scores, cuts, strict=True)
        ]
        selections.append(_survival(selections))
        rows = [*(counted & (cut < amount) for cut in cuts), selections[-1].mask.any(-1)]
        # One sum over processes for all terms, as in `joint_terms`, because another process may use that code path.
        numbers = divisor(torch.stack([counts.sum() for counts in rows]), labels.dtype)
        totals = [
            torch.where(counts, self._bce(selection, lists), 0.0).sum()
            for selection, counts in zip(selections, rows, strict=True)
        ]
        *terms, joint = (torch.stack(totals) / numbers).unbind()
        return ObjectiveOutput.of_stages(self.weights(terms) + joint, terms, joint=joint)

    def _select(self, scores: Tensor, cut: Tensor, lists: _Lists) -> SoftSelection:
        operator = self.loss.operator
        assert operator is not None
        if lists.weights is None:
            selection = operator.membership(scores, cut, lists.mask)
        else:
            selection = operator.weighted_membership(scores, cut, lists.mask, lists.weights)
        return self.loss.clamp(selection) if isinstance(self.loss, TopKLoss) else selection

    def _bce(self, selection: SoftSelection, lists: _Lists) -> Tensor:
        log_p, log_q = add_eps(selection.log_p, self.eps), add_eps(selection.log_q, self.eps)
        if lists.weights is None:
            return selection_bce(SoftSelection(log_p, log_q, selection.mask), lists.target.to(log_p.dtype))
        log_likelihood = torch.where(selection.mask, torch.where(lists.target, log_p, log_q), 0.0)
        return -(log_likelihood * lists.weights).sum(1) / torch.where(lists.amount > 0, lists.amount, 1.0)

    def _list_k(self, positive: Tensor, amount: Tensor, k: int) -> Tensor:
        if self.loss.k == "positives":
            return positive.sum(-1)
        return torch.minimum(torch.full_like(amount, self.loss.k if isinstance(self.loss.k, int) else k), amount)


class _Lists(NamedTuple):
    """A batch of lists.

    Attributes:
        labels: (B, N).
        mask: Boolean (B, N).
        weights: (B, N), weights of the items; None = 1 each.
        target: Boolean (B, N), the true top k.
        k: (B,), k of each list.
        amount: (B,), the number or the total weight of the valid items.
    """

    labels: Tensor
    mask: Tensor
    weights: Tensor | None
    target: Tensor
    k: Tensor
    amount: Tensor


def _only(selection: SoftSelection, rows: Tensor) -> SoftSelection:
    """Return the selection restricted to `rows`: all other lists get log p = 0 and are masked."""
    row = rows[:, None]
    log_p = torch.where(row & selection.mask, selection.log_p, 0.0)
    log_q = torch.where(row & selection.mask, selection.log_q, -torch.inf)
    return SoftSelection(log_p, log_q, selection.mask & row)


def _survival(selections: Sequence[SoftSelection]) -> SoftSelection:
    """Return the soft membership of the items that survive every stage."""
    log_p, log_q = survival_logs([s.log_p for s in selections], [s.log_q for s in selections])
    return SoftSelection(log_p, log_q, torch.stack([s.mask for s in selections]).any(0))
