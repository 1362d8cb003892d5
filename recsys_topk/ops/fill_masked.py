"""A constant in place of masked entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.ops.dispatch import is_plain


def fill_masked(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """Return `x` with 0 or -inf where `mask` is false; masked entries, NaN included, get zero gradient.

    `torch.where` reads a scattered mask one branch at a time; on CPU the entries are replaced by arithmetic on their
    bits instead, three to four times faster.

    Args:
        x: (B, N), float32 or float64.
        mask: Boolean, the shape of `x`.
        value: 0 or -inf.

    Example:
        >>> fill_masked(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]), 0.0)
        tensor([[1., 0.]])
    """
    if not x.is_cpu or not is_plain(x):
        return torch.where(mask, x, value)
    if x.requires_grad and torch.is_grad_enabled():
        filled: Tensor = _FillMasked.apply(x, mask, value)  # type: ignore[no-untyped-call]
        return filled
    return _fill_bits(x.detach(), mask, value)


class _FillMasked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(mask)
        return _fill_bits(x, mask, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return fill_masked(grad, mask, 0.0), None, None


def _fill_bits(x: Tensor, mask: Tensor, value: float) -> Tensor:
    # Two's complement: valid -> ...111, masked -> 0. The bits of -inf are -1 shifted past the mantissa.
    integer, mantissa = (np.int32, 23) if x.dtype == torch.float32 else (np.int64, 52)
    valid = mask.numpy().view(np.uint8).astype(integer)
    bits = np.negative(valid)
    np.bitwise_and(bits, x.numpy().view(integer), out=bits)
    if value != 0.0:
        valid -= 1
        valid <<= mantissa
        bits |= valid
    return torch.from_numpy(bits.view(np.float32 if integer is np.int32 else np.float64))
