"""Sinkhorn iteration: factors with which the rows and columns of a matrix sum to 1."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import may_read

# The iteration of a list stops when all its sums differ from 1 by less than this.
TOLERANCE = 1e-6
# Lower bound of the sums. Sums of a relaxed permutation are larger, except for rounding errors of very large scores.
LEAST = 1e-10


def sinkhorn_scaling(matrix: Tensor, rows: Tensor, columns: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Return u and v such that the rows and columns of u_r M_ri v_i sum to 1, (B, N) each.

    Each round scales the columns, then the rows. The iteration of a list stops when all its sums are within 1e-6 of 1,
    or after `rounds` rounds. The gradient is that of the executed rounds. A round takes O(N^2) time. In addition to the
    matrix, a list takes O(rounds N) memory.

    Args:
        matrix: M, (B, N, N), not negative; 0 outside of `rows` and `columns`.
        rows: Boolean (B, N), the valid rows; as many as valid columns.
        columns: Boolean (B, N), the valid columns.
        rounds: Largest number of rounds, at least 1.

    Example:
        >>> m, every = torch.tensor([[[2.0, 1.0], [1.0, 4.0]]]), torch.ones(1, 2, dtype=torch.bool)
        >>> u, v = sinkhorn_scaling(m, every, every, 50)
        >>> (u[:, :, None] * m * v[:, None, :]).sum(1).round(decimals=3)
        tensor([[1., 1.]])
    """
    u, v = rows.to(matrix.dtype), columns.to(matrix.dtype)
    going = torch.ones_like(rows[:, :1])
    for _ in range(rounds):
        v = torch.where(going, _inverse(_times(matrix.mT, u), columns), v)
        u = torch.where(going, _inverse(_times(matrix, v), rows), u)
        going = going & _unfinished(matrix.detach(), u.detach(), v.detach(), columns)
        if may_read(going) and not bool(going.any()):
            break
    return u, v


def _unfinished(matrix: Tensor, u: Tensor, v: Tensor, columns: Tensor) -> Tensor:
    """Return which lists have not converged, (B, 1). A round ends with the rows, so that only columns can be off."""
    return ((v * _times(matrix.mT, u) - columns.to(v.dtype)).abs() >= TOLERANCE).any(1, keepdim=True)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[:, :, None])[:, :, 0]


def _inverse(sums: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, 1.0 / torch.where(counted, sums, 1.0).clamp_min(LEAST), 0.0)
