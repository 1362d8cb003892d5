"""Linear recurrences along rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import run_parts
from recsys_topk.ops.dispatch import apply, is_float32, operation, save

_LISTS = Loop("recsys_topk.ops.backends.compiled.scans:recurrence_lists")


def scan(a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    """Return s with s_i = a_i s_{i-1} + b_i along rows (from the end with `reverse`), (B, N), differentiable.

    Each row is divided into about sqrt(N / B) pieces, which are computed in parallel. Then the last value of each piece
    is carried over to the next one. This takes O(N) work per row in O(sqrt(B N)) or fewer steps. The gradient is a
    recurrence in the other direction.

    Example:
        >>> scan(torch.full((1, 3), 0.5), torch.ones(1, 3))
        tensor([[1.0000, 1.5000, 1.7500]])
    """
    done: Tensor = apply(_Scan, a, b, reverse)
    return done


@operation(fake=lambda a, b, reverse: torch.empty_like(b))
def recurrence(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    """Return the result of `scan`, without a gradient."""
    if reverse:
        a, b = a.flip(1), b.flip(1)
    rows, n = b.shape
    pieces = max(1, min(n, round((n / max(1, rows)) ** 0.5)))
    length = -(-n // pieces)
    pieces = -(-n // length)
    padding = pieces * length - n
    if padding:
        a, b = torch.nn.functional.pad(a, (0, padding)), torch.nn.functional.pad(b, (0, padding))
    # The values of one step are adjacent in memory: (length, rows * pieces).
    factor = a.reshape(rows * pieces, length).t().contiguous()
    total = b.reshape(rows * pieces, length).t().clone(memory_format=torch.contiguous_format)
    for i in range(1, length):
        torch.addcmul(total[i], factor[i], total[i - 1], out=total[i])
    if pieces > 1:
        factor = factor.cumprod(0)
        ends, carry = total[-1].reshape(rows, pieces), torch.zeros(rows, pieces, dtype=b.dtype, device=b.device)
        whole = factor[-1].reshape(rows, pieces)
        for j in range(1, pieces):
            carry[:, j] = ends[:, j - 1] + whole[:, j - 1] * carry[:, j - 1]
        total.addcmul_(factor, carry.reshape(-1))
    done = total.t().reshape(rows, pieces * length)[:, :n]
    return done.flip(1) if reverse else done.contiguous()


@recurrence.backend("numba", lambda a, b, reverse: is_float32(a, b))
def _numba(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    result = torch.empty(b.shape)
    run_parts(_LISTS, len(b), b.shape[1], a.detach().contiguous(), b.detach().contiguous(), int(reverse), result)
    return result


class _Scan(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
        return recurrence(a, b, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        a, _, ctx.reverse = inputs
        save(ctx, a, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, s = ctx.saved_tensors
        nothing = torch.zeros_like(a[:, :1])
        if ctx.reverse:  # s_i = a_i s_{i+1} + b_i
            grad_b = scan(torch.cat((nothing, a[:, :-1]), 1), grad)
            return grad_b * torch.cat((s[:, 1:], nothing), 1), grad_b, None
        grad_b = scan(torch.cat((a[:, 1:], nothing), 1), grad, reverse=True)
        return grad_b * torch.cat((nothing, s[:, :-1]), 1), grad_b, None

    @staticmethod
    def tangents(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None, _: Any) -> Tensor:
        a, s = ctx.saved_tensors
        nothing = torch.zeros_like(a[:, :1])
        before = torch.cat((s[:, 1:], nothing) if ctx.reverse else (nothing, s[:, :-1]), 1)
        moved = torch.zeros_like(s) if tangent_a is None else tangent_a * before
        return scan(a, moved if tangent_b is None else moved + tangent_b, ctx.reverse)
