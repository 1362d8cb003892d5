"""Sinkhorn iteration: factors with which the rows and columns of a matrix sum to 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import closed_form, may_read, operation, through_reference, wants_graph

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
    u, v = closed_form(_Scaling, _reference, matrix, rows, columns, rounds)
    return u, v


def _reference(matrix: Tensor, rows: Tensor, columns: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
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


class _Scaling(torch.autograd.Function):
    """Save the factors of every round, and compute the gradient of the matrix in one product at the end."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor, columns: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        us, vs, steps = scaling_history(matrix, rows, columns, rounds)
        last = (steps - 1)[:, None, None].expand(-1, 1, us.shape[2])
        ctx.save_for_backward(matrix, rows, columns, us, vs, steps)
        ctx.rounds = rounds
        return us.gather(1, last)[:, 0], vs.gather(1, last)[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_u: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        matrix, rows, columns, us, vs, steps = ctx.saved_tensors
        if wants_graph():
            return through_reference(_reference, (matrix, rows, columns, ctx.rounds), (grad_u, grad_v))
        first = rows.to(matrix.dtype)
        return scaling_gradient(matrix, first, us, vs, steps, grad_u.contiguous(), grad_v.contiguous()), *[None] * 3


def _fake_history(matrix: Tensor, rows: Tensor, columns: Tensor, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (rows.shape[0], rounds, rows.shape[1])
    steps = torch.empty(rows.shape[:1], dtype=torch.int64, device=matrix.device)
    return matrix.new_empty(shape), matrix.new_empty(shape), steps


@operation(fake=_fake_history)
def scaling_history(matrix: Tensor, rows: Tensor, columns: Tensor, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return u and v after every round, (B, rounds, N) each, and the number of rounds of each list, (B,).

    The values after the last round of a list are 0. The arguments are those of `sinkhorn_scaling`, without a gradient.
    """
    lists, n = rows.shape
    us, vs = matrix.new_zeros(lists, rounds, n), matrix.new_zeros(lists, rounds, n)
    u, across = rows.to(matrix.dtype), matrix.mT
    going = torch.ones_like(rows[:, :1])
    steps = torch.zeros(lists, dtype=torch.int64, device=matrix.device)
    for step in range(rounds):
        v = _inverse(_times(across, u), columns)
        u = _inverse(_times(matrix, v), rows)
        us[:, step], vs[:, step] = u * going, v * going
        steps += going[:, 0]
        going = going & _unfinished(matrix, u, v, columns)
        if may_read(going) and not bool(going.any()):
            break
    return us, vs, steps


def _fake_gradient(
    matrix: Tensor, first: Tensor, us: Tensor, vs: Tensor, steps: Tensor, grad_u: Tensor, grad_v: Tensor
) -> Tensor:
    return torch.empty_like(matrix)


@operation(fake=_fake_gradient)
def scaling_gradient(
    matrix: Tensor, first: Tensor, us: Tensor, vs: Tensor, steps: Tensor, grad_u: Tensor, grad_v: Tensor
) -> Tensor:
    """Return the gradient of the matrix, (B, N, N), from the gradients of the last u and v.

    Args:
        matrix: (B, N, N).
        first: u before the first round, (B, N).
        us: (B, rounds, N), see `scaling_history`.
        vs: (B, rounds, N).
        steps: (B,).
        grad_u: (B, N).
        grad_v: (B, N).
    """
    across = matrix.mT
    before = torch.cat((first[:, None], us[:, :-1]), 1)
    row_sums, column_sums = torch.zeros_like(us), torch.zeros_like(vs)
    running = torch.zeros_like(grad_u)
    for step in reversed(range(int(steps.max()) if may_read(steps) and len(steps) else us.shape[1])):
        ends = (steps == step + 1)[:, None]
        running = torch.where(ends, grad_u, running)
        row_sums[:, step] = a = -running * _square(us[:, step])
        column_sums[:, step] = b = -(torch.where(ends, grad_v, 0.0) + _times(across, a)) * _square(vs[:, step])
        running = _times(matrix, b)
    return row_sums.mT @ vs + before.mT @ column_sums


def _square(inverse: Tensor) -> Tensor:
    """Return 1 / s^2 for given 1 / s; 0 where s is at its lower bound."""
    return torch.where(inverse * LEAST < 1.0, inverse * inverse, 0.0)
