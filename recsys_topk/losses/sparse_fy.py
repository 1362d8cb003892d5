"""Fenchel-Young loss of Sparse Top-K: a convex loss whose gradient is the membership minus the target."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.operators.sparse import SparseTopK
from recsys_topk.ops.losses.topk_loss import fenchel_young
from recsys_topk.ops.losses.topk_target import topk_target
from recsys_topk.ops.selection.membership import Law


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
        >>> import torch
        >>> loss = SparseFenchelYoungLoss(tau=2.0, k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.5312)
    """

    name, label_kind, family, cost = "sparse_fy", "binary", "top-k", SparseTopK.cost
    requires_k = True
    takes_item_weights = True
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
        target = topk_target(labels, mask, k, self.positive_above) > 0
        return fenchel_young(scores, target, mask, self.tau)
