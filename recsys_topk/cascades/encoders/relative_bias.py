"""Learned logits by the distance between two views, and by the time between them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

BUCKETS: Final = 32
"""Gaps are counted in powers of 2 seconds; the last bucket starts at 2^31 seconds."""


class RelativeBias(nn.Module):
    """Logit of view j seen from view i >= j, per head: b[min(i - j, M - 1)] + c[floor(log2(1 + gap of i and j))].

    Args:
        heads: Number of heads, H.
        distances: Number of distances with a separate value, M.
        ages: Whether the data has the ages of the views; without them there is no c.
        slope: Head h starts with b[d] = -slope d / 4^h: the first head looks at the newest views, later ones farther.
    """

    def __init__(self, heads: int, distances: int, ages: bool, slope: float = 1.0) -> None:
        super().__init__()
        if heads < 1 or distances < 1:
            raise ValueError(f"heads and distances must be at least 1, got heads={heads} and distances={distances}")
        slopes = slope / 4.0 ** torch.arange(heads)
        self.by_distance = nn.Parameter(-slopes[:, None] * torch.arange(distances))
        self.by_gap = nn.Parameter(torch.zeros(heads, BUCKETS)) if ages else None

    def forward(self, length: int, ages: Tensor | None = None) -> Tensor:
        """Return the logits of all pairs, (H, L, L) or with ages (B, H, L, L); minus infinity for j > i."""
        steps = torch.arange(length, device=self.by_distance.device)
        distance = steps[:, None] - steps
        bias = self.by_distance[:, distance.clamp(0, self.by_distance.shape[1] - 1)]
        if self.by_gap is not None:
            bias = bias + self._gaps(self.by_gap, ages, None if ages is None else ages[:, :, None])
        return bias.masked_fill(distance < 0, -torch.inf)

    def from_newest(self, length: int, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """Return the logits of all views seen from the newest view, (B, H, L). Padding has no meaning."""
        steps = torch.arange(length, device=lengths.device)
        distance = (lengths[:, None] - 1 - steps).clamp(0, self.by_distance.shape[1] - 1)
        bias = self.by_distance[:, distance].transpose(0, 1)
        if self.by_gap is not None and length:
            newest = None if ages is None else ages.gather(1, (lengths - 1).clamp_min(0)[:, None])
            bias = bias + self._gaps(self.by_gap, ages, newest)
        return bias

    def _gaps(self, by_gap: Tensor, ages: Tensor | None, newest: Tensor | None) -> Tensor:
        """Return c of the gaps, (B, H, L) or (B, H, L, L)."""
        if ages is None or newest is None:
            raise ValueError("the encoder was built for data with ages of the views, but got none; pass ages")
        gap = (ages[:, None] if newest.dim() == 3 else ages) - newest
        bucket = torch.log2(1.0 + gap.clamp_min(0.0)).long().clamp_max(BUCKETS - 1)
        return by_gap[:, bucket].transpose(0, 1)
