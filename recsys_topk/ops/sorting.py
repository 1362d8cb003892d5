"""Sorting with indices, and gradients that treat equal scores alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.dispatch import may_read


def sort_descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and indices by descending value, equal values in their order of appearance; no gradient.

    On CPU a float32 and its index are packed into one 64-bit integer, whose SIMD sort is several times faster than a
    sort that carries indices along.

    Example:
        >>> sort_descending(torch.tensor([[1.0, 3.0, 1.0]]))
        (tensor([[3., 1., 1.]]), tensor([[1, 0, 2]]))
    """
    if x.dtype != torch.float32 or not may_read(x) or x.shape[1] >= 2**31:
        ordered = x.detach().sort(dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    a = np.add(x.detach().numpy(), np.float32(0.0), order="C")  # -0 becomes 0, to which it is equal
    bits = a.view(np.int32)
    key = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))  # integers in the order of the floats
    packed = np.invert(key).astype(np.int64) << 32
    packed |= np.arange(a.shape[1])
    packed.sort(axis=1)
    packed &= 0xFFFFFFFF
    return torch.from_numpy(np.take_along_axis(a, packed, 1)), torch.from_numpy(packed)


def share_ties(x: Tensor) -> Tensor:
    """Return `x`; on the way back, equal entries of a row share their gradient evenly.

    Where a formula follows the sort order, equal scores receive different subgradients. Their average is a
    subgradient too, and does not depend on the order of the items.
    """
    shared: Tensor = _ShareTies.apply(x)  # type: ignore[no-untyped-call]
    return shared


def average_ties(ordered: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` averaged over runs of equal values in rows that are sorted.

    Args:
        ordered: (B, N), sorted along the rows.
        grad: (B, N), in the same order.
    """
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    if may_read(ordered) and bool(fresh.all()):
        return grad
    run = fresh.cumsum(1) - 1
    total = torch.zeros_like(grad).scatter_add(1, run, grad)
    size = torch.zeros_like(grad).scatter_add(1, run, torch.ones_like(grad))
    return (total / size.clamp_min(1.0)).gather(1, run)


class _ShareTies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if may_read(x):
            ordered = np.sort(x.detach().numpy(), axis=1)
            if not (ordered[:, 1:] == ordered[:, :-1]).any():
                return grad
        values, order = sort_descending(x)
        return torch.zeros_like(grad).scatter(1, order, average_ties(values, grad.gather(1, order)))
