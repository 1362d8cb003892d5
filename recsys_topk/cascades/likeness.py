"""How many users items have in common, from the users' sequences. No parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys_topk.cascades.singular_vectors import singular_vectors
from recsys_topk.types import Array


class Likeness(nn.Module):
    """The likeness of items to a history, from a truncated singular value decomposition (PureSVD).

    With V and the number of users n_j of `singular_vectors`, the score of item j after a history h is
    s_j = <sum_{i in h} v_i / sqrt(n_i), v_j sqrt(n_j)>, and its likeness is max(s_j, 0) divided by the mean of s over
    all items. Memory: 4 V (D + 1) bytes. Cost: O(B (H + N) D).

    Args:
        size: Number of items, V.
        dim: Number of singular values, D.

    Example:
        >>> import numpy as np
        >>> likeness = Likeness(4, 2)
        >>> likeness.count(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]))
        >>> history, items = torch.tensor([[0, 3]]), torch.tensor([[1, 2]])
        >>> likeness(history, torch.tensor([[True, False]]), items).round()
        tensor([[2., 0.]])
    """

    vectors: Tensor
    users: Tensor

    def __init__(self, size: int, dim: int = 64) -> None:
        super().__init__()
        if min(size, dim) < 1:
            raise ValueError(f"size and dim must be at least 1, got {size} and {dim}")
        self.register_buffer("vectors", torch.zeros(size, dim))
        self.register_buffer("users", torch.zeros(size))

    def count(self, user: Array, item: Array) -> None:
        """Decompose the matrix of users and items; the arguments are those of `Successors.count`."""
        vectors, _, users = singular_vectors(user, item, *self.vectors.shape)
        self.vectors.copy_(vectors)
        self.users.copy_(users)

    def forward(self, history: Tensor, real: Tensor, items: Tensor) -> Tensor:
        """Return the likeness of items to a history, (B, N).

        Args:
            history: (B, H) items.
            real: Boolean (B, H), False = padding.
            items: (B, N) items.
        """
        root = self.users.sqrt()
        weights = real / root[history].clamp_min(1.0)
        taste = torch.bmm(weights[:, None], self.vectors[history]).squeeze(1)
        mean = taste @ (root @ self.vectors) / len(root)
        scores = torch.bmm(self.vectors[items], taste[:, :, None]).squeeze(-1) * root[items]
        return scores.clamp_min(0) / mean.clamp_min(1e-6)[:, None]
