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
from recsys_topk.losses.item_weights import true_weights
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import LOG2, is_full
from recsys_topk.ops.losses.pair_spans import better_items

Activation = Literal["exp", "tanh", "relu", "atan"]


def item_log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return log softmax over the valid items of each list, 0 where masked, (B, N); every list has a valid item."""
    if is_full(mask):
        return F.log_softmax(scores, -1)
    return torch.where(mask, F.log_softmax(torch.where(mask, scores, -math.inf), -1), 0.0)


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

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        if self.activation != "exp" or self.tau_positives is not None:
            ks = None if k is None else k if isinstance(k, Tensor) else torch.full_like(labels[:, 0], k)
            return self.per_list_weighted(scores, labels, mask, ks, mask.to(scores.dtype))
        positive = true_items(labels, mask, k, self.positive_above)
        x = scores if self.tau == 1.0 else scores / self.tau
        if self.against == "all":
            losses = -item_log_softmax(x, mask)
        else:
            # -log(exp(x_i) / (exp(x_i) + sum_neg exp(x_j))) = log(1 + exp(logsumexp_neg - x_i))
            negative = mask & ~positive
            some = negative.any(-1, keepdim=True)
            rivals = torch.logsumexp(torch.where(negative, x, torch.where(some, -math.inf, x)), -1, keepdim=True)
            losses = torch.where(some, -F.logsigmoid(x - rivals), 0.0)
        return (losses * positive).sum(-1) / positive.sum(-1).clamp_min(1)

    def per_list_weighted(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """See `RankingLoss.per_list_weighted`."""
        true = true_weights(labels, mask, k, self.positive_above, weights)
        if self.activation != "exp":
            return self._pairwise(scores, true, weights if self.against == "all" else weights - true)
        x = scores / self.tau
        rivals = mask if self.against == "all" else mask & (true == 0)
        some = rivals.any(1, keepdim=True)
        logs = torch.where(rivals, x + weights.log(), torch.where(some, -math.inf, 0.0))
        partition = torch.logsumexp(logs, 1, keepdim=True)
        if self.tau_positives is not None:
            best = torch.where(true > 0, scores / self.tau_positives + true.log(), torch.finfo(x.dtype).min)
            mean = torch.logsumexp(best, 1) - true.sum(1).clamp_min(torch.finfo(x.dtype).tiny).log()
            return torch.where(some[:, 0], partition[:, 0] - self.tau_positives / self.tau * mean, 0.0)
        losses = partition - x if self.against == "all" else torch.where(some, -F.logsigmoid(x - partition), 0.0)
        return (torch.where(true > 0, losses, 0.0) * true).sum(1) / true.sum(1).clamp_min(torch.finfo(x.dtype).tiny)

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
