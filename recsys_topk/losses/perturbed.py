"""Perturbed top-k BCE: cross-entropy of how often an item is selected under noise."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.perturbed import PerturbedTopK


class PerturbedTopKLoss(TopKLoss):
    """Cross-entropy of the mean of hard top-k memberships under Gaussian noise.

    Memberships of exactly 0 and 1 are moved to 1e-6 and 1 - 1e-6, and pass no gradient.

    Args:
        tau: Standard deviation of the noise.
        samples: Number of noised copies.
        seed: None = fresh noise at each call, governed by `torch.manual_seed`; an int = the same noise at each call.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = PerturbedTopKLoss(k=2, seed=0)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(1.1609)
    """

    name: ClassVar[str] = "perturbed"
    cost: ClassVar[str] = PerturbedTopK.cost
    paper: ClassVar[str] = PerturbedTopK.paper
    clamped: ClassVar[bool] = True

    def __init__(
        self,
        tau: float = 1.0,
        samples: int = 64,
        seed: int | None = None,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = PerturbedTopK(tau, samples, seed)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
