"""NeuralNDCG: one minus NDCG with NeuralSort's relaxed permutation instead of a sort."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.ops.losses.dcg import Gain, check_gain, normalised_gains, rank_discounts
from recsys_topk.ops.losses.neural_ndcg import neural_ndcg


class NeuralNDCGLoss(RankingLoss):
    """One minus NDCG in which every rank holds a mixture of items.

    L = 1 - sum_{r <= k} D(r) sum_i P_ri G_i, G = gain / ideal DCG@k, D(r) = 1 / log2(1 + r). P is NeuralSort's matrix,
    row r = softmax_i(((n + 1 - 2 r) x_i - sum_j |x_i - x_j|) / tau), scaled by Sinkhorn iterations until rows and
    columns sum to 1. The gradient flows through the iterations. The iterations of a list end when its row and column
    sums are within 1e-6 of 1, or after `rounds` iterations. L is clamped at 0, because the sums may then still differ
    from 1.

    The paper's transposed form, sum_i G_i sum_{r <= k} P_ri D(r), is the same sum in a different order.

    Shapes: scores, labels and mask (B, N). Labels: graded. Cost: O(N^2) time per round and O(N^2) memory per list.

    Args:
        tau: Temperature.
        gain: ``"exponential"``, 2^y - 1, or ``"linear"``, y. None = by the kind of labels: exponential for grades
            (the default), linear for places (such as RecFlow's 29..20).
        rounds: Maximum number of Sinkhorn iterations.
        k: Cut-off of NDCG@k; None = no cut-off.
        options: See `RankingLoss`.

    Example:
        >>> import torch
        >>> NeuralNDCGLoss(tau=0.1)(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.3691)
    """

    name, label_kind, family, cost = "neural_ndcg", "graded", "listwise", "n^2"
    paper = "Pobrotyn and Bialobrzeski 2021, arXiv 2102.07831"

    def __init__(
        self, tau: float = 1.0, gain: Gain | None = None, rounds: int = 50, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds must be a positive int, got {rounds!r}")
        self.tau = check_positive("tau", tau)
        given = None if gain is None else check_gain(gain)
        self.gain: Gain = self._by_labels("gain", given, grades="exponential", places="linear")
        self.rounds = rounds

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        gains = normalised_gains(labels, self.gain, mask, k)
        discounts = rank_discounts(scores.shape[1], k, scores).expand_as(scores)
        return neural_ndcg(scores, gains, discounts, mask, self.tau, self.rounds)
