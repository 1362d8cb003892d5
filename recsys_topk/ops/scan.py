"""Linear recurrences along rows."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.ops.opaque import opaque


def _fake_scan(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    return torch.empty_like(b)


def scan(a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    """Return s with s_i = a_i s_{i-1} + b_i along rows (from the end with `reverse`), (B, N); no gradient.

    Rows are cut into about sqrt(N / B) pieces that advance together, and the last values of the pieces are then carried
    over: O(N) work in O(sqrt(B N)) or fewer steps.

    Example:
        >>> scan(torch.full((1, 3), 0.5), torch.ones(1, 3))
        tensor([[1.0000, 1.5000, 1.7500]])
    """
    done: Tensor = _scan(a, b, reverse)
    return done


@opaque(_fake_scan)
def _scan(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    if reverse:
        a, b = a.flip(1), b.flip(1)
    rows, n = b.shape
    pieces = max(1, min(n, round((n / max(1, rows)) ** 0.5)))
    length = -(-n // pieces)
    pieces = -(-n // length)
    padding = pieces * length - n
    if padding:
        a, b = torch.nn.functional.pad(a, (0, padding)), torch.nn.functional.pad(b, (0, padding))
    # Step by step in memory order: (length, rows * pieces).
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
