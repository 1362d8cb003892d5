"""The mean of the views. Their order does not matter."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.cascades.encoders.base import HistoryEncoder


class MeanEncoder(HistoryEncoder):
    """Encoding = mean of the views; 0 for an empty history. Stages read it from the tables with one bag per request.

    Example:
        >>> views = torch.tensor([[[2.0], [4.0], [0.0]]])
        >>> MeanEncoder(1).prefixes(views, torch.tensor([2]))[0, :3, 0]
        tensor([0., 2., 3.])
    """

    name: ClassVar[str] = "mean"
    ordered: ClassVar[bool] = False

    def prefixes(self, views: Tensor, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """See `HistoryEncoder.prefixes`."""
        numbers = torch.arange(1, views.shape[1] + 1, device=views.device)
        return F.pad(views.cumsum(1) / numbers[:, None], (0, 0, 1, 0))
