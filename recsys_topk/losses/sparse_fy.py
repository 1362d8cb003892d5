"""Fenchel-Young loss of Sparse Top-K: a convex loss whose gradient is membership minus truth, with no dead zone."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import RankingLoss, Reduction
from recsys_topk.losses.topk import topk_target
from recsys_topk.numerics import is_full
from recsys_topk.operators.sparse import SparseTopK, clip_threshold
from recsys_topk.ops.fill_masked import fill_masked


class SparseFenchelYoungLoss(RankingLoss):
    """tau times the mean over valid items of H(z_i) for the others and H(1 - z_i) for the true ones.

    z = x / tau - t with t such that the memberships p = clip(z, 0, 1) sum to the number of true items, and H(u) = 0
    below 0, u^2 / 2 up to 1, u - 1/2 above: a hinge on each side of a threshold that moves with the list. It is the
    Fenchel-Young loss (Blondel et al. 2020) of the projection of `SparseTopK`, so it is convex, 0 exactly where all
    true items lead all others by tau, and its gradient is (p - y) / n: an item on the wrong side always has one, where
    the cross-entropy of the same membership (`sparse`) gives it none.

    Shapes: scores, labels and mask (B, N). Labels: binary, or graded with `k`. Cost: O(N) a pass, a few passes.

    Args:
        tau: Regularisation (l in the paper): the margin.
        k: How many items are true, at most; a list with fewer positives has that many. Required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> loss = SparseFenchelYoungLoss(tau=2.0, k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.5312)
    """

    name: ClassVar[str] = "sparse_fy"
    label_kind: ClassVar[Literal["graded", "binary"]] = "binary"
    family: ClassVar[str] = "top-k"
    cost: ClassVar[str] = SparseTopK.cost
    requires_k: ClassVar[bool] = True
    paper: ClassVar[str] = SparseTopK.paper

    def __init__(
        self,
        tau: float = 1.0,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        super().__init__(k=k, positive_above=positive_above, reduction=reduction, validate=validate)
        self.tau = check_positive("tau", tau)

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        target = topk_target(labels, mask, k, self.positive_above)
        losses: Tensor = _FenchelYoung.apply(scores, target, mask, self.tau)  # type: ignore[no-untyped-call]
        return losses


class _FenchelYoung(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, mask: Tensor, tau: float) -> Tensor:
        items, wanted = mask.sum(1), target.sum(1).long()
        proper = (wanted > 0) & (wanted < items)  # tied labels may make every item true: nothing to tell apart
        z = scores / tau if is_full(mask) else fill_masked(scores / tau, mask, -torch.inf)
        # A list with nothing to tell apart gets some threshold that exists, and loss and gradient 0.
        z = z - clip_threshold(z, torch.where(proper, wanted, 1).clamp_max(max(1, scores.shape[1] - 1)))
        share = (proper / items.clamp_min(1)).to(scores.dtype)[:, None]
        ctx.save_for_backward(torch.where(mask, (z.clamp(0.0, 1.0) - target) * share, 0.0))
        wrong = torch.where(target > 0.5, 1.0 - z, z)
        hinge = 0.5 * wrong.clamp(0.0, 1.0).square() + (wrong - 1.0).clamp_min(0.0)
        return tau * torch.where(mask & proper[:, None], hinge * share, 0.0).sum(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad[:, None] * gradient, None, None, None
