"""The logQ correction of losses with a softmax over sampled candidates."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor


class SampledCandidates:
    """Mixin of losses: the correction of scores for the probability with which candidates were sampled.

    Attributes:
        partition_tau: Temperature of the softmax over the list; None for losses without one.
    """

    name: ClassVar[str]
    partition_tau: float | None = None

    def correct_sampling(self, scores: Tensor, log_q: Tensor) -> Tensor:
        """Return the corrected scores x - tau log q (logQ correction for sampled candidates).

        With them, sum_j exp(x_j / tau) over a list estimates the sum over all items. Raises for losses that do not
        divide by that sum. A positive is in its list with certainty: its log q is 0, and it is not corrected. This is
        the corrected logQ of Khrylchenko et al. 2025, arXiv 2507.09331: with P the softmax of a positive and N the
        corrected negatives, the gradient is that of -(1 - P) log(exp(x_i / tau) / sum_N exp(x_j / tau)) with a constant
        factor 1 - P. Subtracting log q of the positives too, as for in-batch negatives, is biased.

        Args:
            scores: (B, N).
            log_q: (B, N), the log probability that each candidate was sampled into its list; 0 = certain.

        Example:
            >>> import torch
            >>> from recsys_topk.losses import SoftmaxLoss
            >>> SoftmaxLoss(tau=2.0).correct_sampling(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, -1.0]]))
            tensor([[1., 5.]])
        """
        if self.partition_tau is None:
            raise ValueError(
                f"the loss {self.name!r} has no softmax over the list, so a logQ correction does not apply; "
                f"use 'softmax' or 'listnet' (with target 'normalised'), or --data.logq_correction false"
            )
        return scores - self.partition_tau * log_q
