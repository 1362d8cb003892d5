"""Pointwise binary cross-entropy."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import masked_mean


class BCELoss(RankingLoss):
    """Pointwise binary cross-entropy with the scores as logits.

    L = mean over valid items of log(1 + exp(x_i)) - y_i x_i, y_i = 1 for positive items.

    With sampled negatives, scores are too large, because most negatives are missing. gBCE corrects this: the term of a
    positive is multiplied by 1 - t (1 - a), a the share of the negatives that are sampled (`sampling_rate`) and t the
    `calibration`. With t = 1 the scores are those of a model trained with all negatives; with t = 0 nothing changes.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N). Use it when the scores must be calibrated
    probabilities; it does not depend on the order. As in every loss here, lists without a positive are skipped.

    Args:
        sampling_rate: Share of the negatives of the catalogue that are in a list, in (0, 1]; 1 = plain cross-entropy.
        calibration: t of gBCE, from 0 to 1.
        k: If given, only the true top k are positive.
        options: See `RankingLoss`.

    Example:
        >>> import torch
        >>> BCELoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.0444)
    """

    name, label_kind, family, cost = "bce", "binary", "pointwise", "n"
    takes_item_weights = True
    paper = "Cox 1958, JRSS B; gBCE: Petrov and Macdonald 2023, RecSys, arXiv 2308.07192"

    def __init__(self, sampling_rate: float = 1.0, calibration: float = 0.75, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        if not 0.0 < sampling_rate <= 1.0:
            raise ValueError(f"sampling_rate must be in (0, 1], got {sampling_rate!r}")
        if not 0.0 <= calibration <= 1.0:
            raise ValueError(f"calibration must be from 0 to 1, got {calibration!r}")
        self.sampling_rate, self.calibration = float(sampling_rate), float(calibration)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        target = true_items(labels, mask, k, self.positive_above, weights).to(scores.dtype)
        losses = F.binary_cross_entropy_with_logits(scores, target, weights, reduction="none")
        if self.sampling_rate < 1.0 and self.calibration > 0.0:
            losses = losses * (1.0 - self.calibration * (1.0 - self.sampling_rate) * target)
        return masked_mean(losses, mask) if weights is None else losses.sum(1) / weights.sum(1)
