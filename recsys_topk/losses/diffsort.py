"""DiffSort-BCE: cross-entropy of the top-k mass of a relaxed sorting network."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.diffsort import DiffSort, Distribution, Network


class DiffSortLoss(TopKLoss):
    """Cross-entropy of the mass that an item sends to the k best outputs of a relaxed sorting network.

    Args:
        tau: Temperature, the inverse of the network's steepness.
        network: ``"bitonic"`` (log^2 n layers) or ``"odd_even"`` (n layers).
        distribution: Of the relaxed comparison; see `recsys_topk.operators.DiffSort`.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = DiffSortLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.8084)
    """

    name: ClassVar[str] = "diffsort"
    cost: ClassVar[str] = DiffSort.cost
    paper: ClassVar[str] = DiffSort.paper

    def __init__(
        self,
        tau: float = 1.0,
        network: Network = "bitonic",
        distribution: Distribution = "cauchy",
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = DiffSort(tau, network, distribution)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
