"""ListNet: cross-entropy between a distribution over the labels and the softmax of the scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.softmax import item_losses
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import is_full

Target = Literal["softmax", "normalised"]


class ListNetLoss(RankingLoss):
    """Cross-entropy between the top-one probabilities of the labels and of the scores.

    L = -sum_i q_i log softmax(x / tau)_i, with q = softmax(y / label_tau) (``target="softmax"``, the paper) or
    q = y / sum(y) (``target="normalised"``), over valid items.

    Shapes: scores, labels and mask (B, N). Labels: graded. Cost: O(N). A cheap and stable listwise loss. The softmax of
    labels such as RecFlow's 29..20 puts nearly all mass on the first item: use ``normalised`` or a larger `label_tau`.

    Args:
        target: ``"softmax"`` or ``"normalised"``. None = by the kind of labels: softmax for grades (the default),
            normalised for places.
        tau: Temperature of the scores.
        label_tau: Temperature of the softmax of the labels; not used by ``"normalised"``.
        k: If given, only the true top k have mass in the target.
        options: See `RankingLoss`.

    Example:
        >>> ListNetLoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.4076)
    """

    name, label_kind, family, cost = "listnet", "graded", "listwise", "n"
    takes_item_weights = True
    paper = "Cao et al. 2007, ICML"

    def __init__(
        self, target: Target | None = None, tau: float = 1.0, label_tau: float = 1.0, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        if target not in (None, "softmax", "normalised"):
            raise ValueError(f"target must be 'softmax' or 'normalised', got {target!r}")
        self.target: Target = self._by_labels("target", target, grades="softmax", places="normalised")
        self.tau = check_positive("tau", tau)
        self.label_tau = check_positive("label_tau", label_tau)

    def correct_sampling(self, scores: Tensor, log_q: Tensor) -> Tensor:
        """See `RankingLoss.correct_sampling`. A softmax target also depends on the sample and cannot be corrected."""
        self.partition_tau = self.tau if self.target == "normalised" else None
        return super().correct_sampling(scores, log_q)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        admitted = mask if k is None else true_items(labels, mask, k, self.positive_above, weights)
        x = scores if self.tau == 1.0 else scores / self.tau
        if weights is not None:
            labels = labels + self.label_tau * weights.log() if self.target == "softmax" else labels * weights
        return (self._target(labels, admitted) * item_losses(x, mask, weights)).sum(-1)

    def _target(self, labels: Tensor, admitted: Tensor) -> Tensor:
        if self.target == "softmax":
            y = labels / self.label_tau
            if not is_full(admitted):
                # Not -inf: a list with k = 0 admits no item, and its target must be 0 instead of NaN.
                y = torch.where(admitted, y, torch.finfo(y.dtype).min)
            # Not torch.softmax: its float32 sum over millions of items is off by more than 0.1 %.
            return (y - torch.logsumexp(y, -1, keepdim=True)).exp() * admitted
        y = labels if is_full(admitted) else torch.where(admitted, labels, 0.0)
        return y / y.sum(-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
