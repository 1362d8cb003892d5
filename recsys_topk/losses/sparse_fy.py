"""Fenchel-Young loss of Sparse Top-K: a convex loss whose gradient is the membership minus the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.numerics import is_full
from recsys_topk.operators.sparse import SparseTopK
from recsys_topk.ops.dispatch import closed_form, through_reference, wants_graph
from recsys_topk.ops.losses.topk_loss import Law
from recsys_topk.ops.losses.topk_target import topk_target
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.clip import clip_threshold
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.from_threshold import from_threshold


class SparseFenchelYoungLoss(RankingLoss):
    """Convex loss of the Sparse Top-K membership: a smooth hinge on each side of the list's threshold.

    L = tau times the mean over valid items of H(1 - z_i) for true items and H(z_i) for all others, with
    z = x / tau - t, t such that the memberships p = clip(z, 0, 1) sum to the number of true items, and H(u) = 0
    below 0, u^2 / 2 up to 1, u - 1/2 above. It is the Fenchel-Young loss (Blondel et al. 2020) of the projection of
    `SparseTopK`, so it is convex. It is 0 exactly if every true item exceeds every other item by tau. Its gradient is
    (p - y) / n, so every misplaced item gets a gradient. The cross-entropy of the same membership (`sparse`) gives
    misplaced items with p = 0 or p = 1 no gradient.

    Shapes: scores, labels and mask (B, N). Labels: binary, or graded with `k`. Cost: O(N) per pass, a few passes.

    Args:
        tau: Regularisation (l in the paper): the margin.
        k: Maximum number of true items; all positives are true in a list with fewer. Required here or in the call.
        options: See `RankingLoss`.

    Example:
        >>> loss = SparseFenchelYoungLoss(tau=2.0, k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.5312)
    """

    name, label_kind, family, cost = "sparse_fy", "binary", "top-k", SparseTopK.cost
    requires_k = True
    paper = SparseTopK.paper

    def __init__(self, tau: float = 1.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.tau = check_positive("tau", tau)

    def law(self) -> Law:
        """Return the law of the fused operation; see `recsys_topk.losses.fused`."""
        return Law("fenchel_young", self.tau)

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        target = topk_target(labels, mask, k, self.positive_above)
        items, wanted = mask.sum(1), target.sum(1).long()
        proper = (wanted > 0) & (wanted < items)  # with tied labels all items may be true
        filled = scores if is_full(mask) else fill_masked(scores, mask, -torch.inf)
        # Lists in which all or no items are true get a valid dummy threshold, and loss and gradient 0.
        ks = torch.where(proper, wanted, 1).clamp_max(max(1, scores.shape[1] - 1))
        x, gap = centred(filled, ks)
        threshold = clip_threshold(x.detach() / self.tau, gap / self.tau, ks)
        share = torch.where(mask & proper[:, None], 1.0 / items.clamp_min(1).to(scores.dtype)[:, None], 0.0)
        losses: Tensor = closed_form(_FenchelYoung, _reference, x, threshold, target, share, self.tau)
        return losses


def _hinges(z: Tensor, target: Tensor, share: Tensor, tau: float) -> Tensor:
    wrong = torch.where(target > 0.5, 1.0 - z, z)
    hinge = torch.where(wrong >= 1.0, wrong - 0.5, 0.5 * wrong.clamp_min(0.0).square())
    return tau * torch.where(share > 0, hinge * share, 0.0).sum(1)


def _reference(x: Tensor, threshold: Tensor, target: Tensor, share: Tensor, tau: float) -> Tensor:
    return _hinges(from_threshold(x, threshold * tau, tau, "uniform"), target, share, tau)


class _FenchelYoung(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor, target: Tensor, share: Tensor, tau: float) -> Tensor:
        z = x / tau - threshold
        gradient = torch.where(share > 0, (z.clamp(0.0, 1.0) - target) * share, 0.0)
        ctx.save_for_backward(x, threshold, target, share, gradient)
        ctx.tau = tau
        return _hinges(z, target, share, tau)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, gradient = ctx.saved_tensors
        if wants_graph():
            return through_reference(_reference, (*inputs, ctx.tau), [grad])
        return grad[:, None] * gradient, None, None, None, None
