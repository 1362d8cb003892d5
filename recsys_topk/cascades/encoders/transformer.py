"""A pre-norm causal transformer over the views (SASRec, Kang and McAuley 2018), with relative positions."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recsys_topk.cascades.encoders.base import HistoryEncoder
from recsys_topk.cascades.encoders.relative_bias import RelativeBias


class TransformerEncoder(HistoryEncoder):
    """Encoding of a prefix = state of its newest view after `blocks` pre-norm blocks and a layer norm.

    A view attends to itself and the views before it. Positions enter as a learned bias of the attention logits by
    distance and, where the data has ages, by gap (`RelativeBias`). An empty history has the encoding 0.
    Cost: O(B L W (L + W)) per block.

    Args:
        dim: Width of a view, D.
        ages: Whether the data has the ages of the views.
        width: Width of the states, W; None = D, rounded up to a multiple of `heads`.
        blocks: Number of blocks.
        heads: Number of attention heads; W must be a multiple of it.
        feedforward: Hidden width of the feed-forward layers, as a multiple of W.
        dropout: Dropout of the views and of the output of attention and feed-forward layers.
        distances: Number of distances with a separate bias; older views share the last one.
        scale: Factor of the views, for tables with a small `init_std` (sqrt(D) in SASRec).
        pooled: Whether an encoding gets the term a * (sum of its r views) / sqrt(r) after the layer norm, with a
            learned scale a that starts at 0. It helps where the order of the views matters little.

    Example:
        >>> import torch
        >>> encoder = TransformerEncoder(8, blocks=2)
        >>> encoder.prefixes(torch.zeros(3, 5, 8), torch.tensor([5, 2, 0])).shape
        torch.Size([3, 6, 8])
    """

    name: ClassVar[str] = "transformer"
    contextual: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        ages: bool = False,
        width: int | None = None,
        blocks: int = 1,
        heads: int = 2,
        feedforward: int = 2,
        dropout: float = 0.2,
        distances: int = 64,
        scale: float = 1.0,
        pooled: bool = False,
    ) -> None:
        super().__init__(dim, ages)
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}")
        self.width = -(-dim // heads) * heads if width is None else width
        if self.width % heads:
            raise ValueError(
                f"the width of the transformer must be a multiple of its heads, got width {self.width} and {heads} "
                f"heads; the views have width {dim}"
            )
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.input = nn.Identity() if self.width == dim else nn.Linear(dim, self.width)
        self.blocks = nn.ModuleList(
            Block(self.width, heads, feedforward, dropout, RelativeBias(heads, distances, ages)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(self.width)
        self.pooled = nn.Parameter(torch.zeros(())) if pooled else None

    def prefixes(self, views: Tensor, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """See `HistoryEncoder.prefixes`."""
        states = first = self.dropout(self.input(views * self.scale))
        for block in self.blocks:
            states = block(states, ages)
        states = self.norm(states)
        if self.pooled is not None:
            numbers = torch.arange(1, views.shape[1] + 1, device=views.device)
            states = states + self.pooled * first.cumsum(1) / numbers.sqrt()[:, None]
        return F.pad(states, (0, 0, 1, 0))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    Args:
        width: Width of the states, W.
        heads: Number of attention heads.
        feedforward: Hidden width of the feed-forward layers, as a multiple of W.
        dropout: Dropout of both outputs.
        bias: The causal logits by position.
    """

    def __init__(self, width: int, heads: int, feedforward: int, dropout: float, bias: RelativeBias) -> None:
        super().__init__()
        self.heads, self.bias = heads, bias
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward * width), nn.GELU(), nn.Linear(feedforward * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, ages: Tensor | None = None) -> Tensor:
        """Return the new states, (B, L, W)."""
        parts = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        bias = self.bias(x.shape[1], ages).to(query.dtype)
        bias = bias if bias.dim() == 4 else bias[None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return y
