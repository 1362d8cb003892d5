"""Softmax cross-entropy over the items of a list (InfoNCE, sampled softmax)."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import LOG2, is_full
from recsys_topk.ops.losses.pair_spans import better_items

Activation = Literal["exp", "tanh", "relu", "atan"]


def item_losses(scores: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return log sum_j w_j exp(x_j) - x_i of each list, (B, N), 0 where masked; every list has a valid item."""
    if weights is None:
        losses = -F.log_softmax(scores if is_full(mask) else torch.where(mask, scores, -math.inf), -1)
    else:
        logs = weights.log()
        losses = logs - F.log_softmax(scores + logs, -1)
    return losses if is_full(mask) else torch.where(mask, losses, 0.0)


class SoftmaxLoss(RankingLoss):
    """Softmax cross-entropy: each positive against the rest of its list, mean over the positives.

    L = mean over positives i of -log(exp(x_i / tau) / sum_{j in C_i} exp(x_j / tau)), where C_i is the whole list
    (``against="all"``) or i and the negatives (``against="negatives"``, so that positives do not compete with each
    other). Two variants:

    - PSL (`activation`): L = mean over positives i of log sum_{j in C_i} f(x_j - x_i)^(1 / tau), with f(d) = exp(d) the
      softmax, 1 + tanh(d), max(1 + d, 0) or max(1 + atan(d), 0). These grow less than exp, so that false negatives with
      large scores matter less. The paper has scores of cosines divided by 2. Cost: O(p N) for p positives.
    - BSL (`tau_positives`): L = log sum_j exp(x_j / tau) - t / tau log(mean over positives i of exp(x_i / t)),
      t = `tau_positives`, j in the list, or in the negatives. The smaller t is, the more the best positives count and
      noisy ones do not; for large t this is the mean over the positives.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N). Use it for retrieval with sampled negatives. It
    bounds NDCG over the whole list. The smaller tau is, the more the gradient concentrates on the hardest negatives.

    Args:
        tau: Temperature.
        against: ``"all"`` or ``"negatives"``.
        activation: ``"exp"``, ``"tanh"``, ``"relu"`` or ``"atan"``.
        tau_positives: Temperature of the positives of BSL; None = their mean.
        k: If given, only the true top k are positive.
        options: See `RankingLoss`.

    Example:
        >>> SoftmaxLoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.4076)
    """

    name, label_kind, family, cost = "softmax", "binary", "listwise", "n"
    takes_item_weights = True
    paper = (
        "Bruch et al. 2019, ICTIR; van den Oord et al. 2018, arXiv 1807.03748 (InfoNCE); "
        "PSL: Yang et al. 2024, NeurIPS; BSL: Wu et al. 2024, ICDE, arXiv 2312.12882"
    )

    def __init__(
        self,
        tau: float = 1.0,
        against: Literal["all", "negatives"] = "all",
        activation: Activation = "exp",
        tau_positives: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        if activation not in ("exp", "tanh", "relu", "atan"):
            raise ValueError(f"activation must be 'exp', 'tanh', 'relu' or 'atan', got {activation!r}")
        if activation != "exp" and tau_positives is not None:
            raise ValueError(f"tau_positives requires activation 'exp', got {activation!r}")
        if against not in ("all", "negatives"):
            raise ValueError(f"against must be 'all' or 'negatives', got {against!r}")
        self.tau = check_positive("tau", tau)
        self.partition_tau = self.tau if activation == "exp" else None
        self.against = against
        self.activation: Activation = activation
        self.tau_positives = None if tau_positives is None else check_positive("tau_positives", tau_positives)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        positive = true_items(labels, mask, k, self.positive_above, weights)
        true = positive.to(scores.dtype) if weights is None else torch.where(positive, weights, 0.0)
        if self.activation != "exp":
            every = mask.to(scores.dtype) if weights is None else weights
            return self._pairwise(scores, true, every if self.against == "all" else every - true)
        x = scores if self.tau == 1.0 else scores / self.tau
        amount = true.sum(-1).clamp_min(torch.finfo(x.dtype).tiny)
        if self.against == "all" and self.tau_positives is None:
            return (item_losses(x, mask, weights) * true).sum(-1) / amount
        rivals = mask if self.against == "all" else mask & ~positive
        some = rivals.any(1, keepdim=True)
        logs = torch.where(rivals, x if weights is None else x + weights.log(), torch.where(some, -math.inf, x))
        partition = torch.logsumexp(logs, 1, keepdim=True)
        if self.tau_positives is not None:
            best = torch.where(positive, scores / self.tau_positives + true.log(), torch.finfo(x.dtype).min)
            mean = torch.logsumexp(best, 1) - amount.log()
            return torch.where(some[:, 0], partition[:, 0] - self.tau_positives / self.tau * mean, 0.0)
        # -log(exp(x_i) / (exp(x_i) + sum_neg exp(x_j))) = log(1 + exp(logsumexp_neg - x_i))
        return (torch.where(some & positive, -F.logsigmoid(x - partition), 0.0) * true).sum(-1) / amount

    def _pairwise(self, scores: Tensor, true: Tensor, rivals: Tensor) -> Tensor:
        """Return the loss of PSL, (B,), for weights of the positives and of the items that they are compared with."""
        rows = better_items(true > 0)
        logs = self._log_activation(scores[:, None, :] - scores.gather(1, rows)[:, :, None]) / self.tau
        sums = torch.logsumexp(torch.where(rivals > 0, rivals.log(), torch.finfo(logs.dtype).min)[:, None, :] + logs, 2)
        if self.against == "negatives":  # the positive itself is f(0) = 1
            sums = torch.logaddexp(sums, torch.zeros_like(sums))
        weights = true.gather(1, rows)
        return (sums * weights).sum(1) / weights.sum(1).clamp_min(torch.finfo(sums.dtype).tiny)

    def _log_activation(self, d: Tensor) -> Tensor:
        if self.activation == "tanh":
            return F.logsigmoid(2.0 * d) + LOG2
        f = 1.0 + (d if self.activation == "relu" else torch.atan(d))
        return torch.log(f.clamp_min(torch.finfo(d.dtype).tiny))
