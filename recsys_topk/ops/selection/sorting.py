"""Sort with indices, and share gradients between equal scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.dispatch import apply, is_real, may_read, operation, save


@operation
def sort_descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and indices by descending value. Equal values keep their order. There is no gradient.

    On a CPU a float32 and its index are packed into one 64-bit integer. The SIMD sort of integers is several times
    faster than a sort with indices.

    Example:
        >>> sort_descending(torch.tensor([[1.0, 3.0, 1.0]]))
        (tensor([[3., 1., 1.]]), tensor([[1, 0, 2]]))
    """
    ordered = x.detach().sort(dim=1, descending=True, stable=True)
    return ordered.values, ordered.indices


@sort_descending.backend("numpy", lambda x: is_real(x) and x.dtype == torch.float32 and x.shape[1] < 2**31)
def _sort_numpy(x: Tensor) -> tuple[Tensor, Tensor]:
    a = np.add(x.detach().numpy(), np.float32(0.0), order="C")  # -0 becomes 0, which compares equal
    bits = a.view(np.int32)
    key = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))  # integers with the same order as the floats
    packed = np.invert(key).astype(np.int64) << 32
    packed |= np.arange(a.shape[1])
    packed.sort(axis=1)
    packed &= 0xFFFFFFFF
    return torch.from_numpy(np.take_along_axis(a, packed, 1)), torch.from_numpy(packed)


@operation
def sorted_descending(x: Tensor) -> Tensor:
    """Return the values of each row in descending order, without a gradient.

    Example:
        >>> sorted_descending(torch.tensor([[1.0, 3.0, 2.0]]))
        tensor([[3., 2., 1.]])
    """
    return x.detach().sort(dim=-1, descending=True).values


@sorted_descending.backend("numpy", is_real)
def _sorted_numpy(x: Tensor) -> Tensor:
    negative = np.negative(x.detach().numpy(), order="C")
    negative.sort(axis=-1)
    return torch.from_numpy(np.negative(negative, out=negative))


def share_ties(x: Tensor) -> Tensor:
    """Return `x`. In backward, equal entries of a row get the mean of their gradients.

    A formula that uses the sort order gives equal scores different subgradients. Their mean is also a subgradient, and
    does not depend on the order of the items.
    """
    shared: Tensor = apply(_ShareTies, x)
    return shared


def average_ties(ordered: Tensor, grad: Tensor) -> Tensor:
    """Return the mean of `grad` over each run of equal values in sorted rows.

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


def has_ties(x: Tensor) -> bool:
    """Return whether two entries of a row are equal. This reads the tensor."""
    ordered = sorted_descending(x)
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


class _ShareTies(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].detach()
        if may_read(x) and not has_ties(x):
            return grad
        values, order = sort_descending(x)
        return torch.zeros_like(grad).scatter(1, order, average_ties(values, grad.gather(1, order)))

    tangents = backward  # the average over ties is a symmetric map
