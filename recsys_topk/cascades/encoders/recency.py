"""Weighted means of the views, with learned weights by recency."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.cascades.encoders.base import HistoryEncoder
from recsys_topk.cascades.encoders.relative_bias import RelativeBias


class RecencyEncoder(HistoryEncoder):
    """Encoding = concatenation over heads of sum_j w_j view_j; w = softmax of a learned logit by recency.

    The logit of a view depends on its distance from the newest view and, where the data has ages, on the gap between
    the two (`RelativeBias`). An empty history has the encoding 0. Cost: O(B L D) for one encoding, O(B L^2 D) for all
    prefixes.

    Args:
        dim: Width of a view, D.
        ages: Whether the data has the ages of the views.
        heads: Number of weightings; the width of the output is heads * D.
        distances: Number of distances with a separate weight; older views share the last one.
        slope: Head h starts with weights exp(-slope * distance / 4^h).

    Example:
        >>> encoder = RecencyEncoder(1, heads=1, slope=torch.tensor(2.0).log().item())
        >>> encoder(torch.tensor([[[1.0], [4.0]]]), torch.tensor([2])).detach()  # (1 / 2 + 4) / (1 / 2 + 1)
        tensor([[3.]])
    """

    name: ClassVar[str] = "recency"

    def __init__(self, dim: int, ages: bool = False, heads: int = 2, distances: int = 64, slope: float = 1.0) -> None:
        super().__init__(dim, ages)
        self.width = heads * dim
        self.bias = RelativeBias(heads, distances, ages, slope)

    def prefixes(self, views: Tensor, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """See `HistoryEncoder.prefixes`."""
        weights = self.bias(views.shape[1], ages).softmax(-1)
        heads = weights @ views[:, None]  # (B, H, L, D)
        return F.pad(heads.transpose(1, 2).flatten(2), (0, 0, 1, 0))

    def forward(self, views: Tensor, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """See `HistoryEncoder.forward`."""
        steps = torch.arange(views.shape[1], device=views.device)
        logits = self.bias.from_newest(views.shape[1], lengths, ages)
        # A finite value instead of minus infinity: without views the weights are uniform over views that are 0.
        logits = torch.where((steps < lengths[:, None])[:, None], logits, -1e30)
        return (logits.softmax(-1) @ views).flatten(1)
