"""Stable arithmetic shared by operators, losses and metrics: masks, logarithms, float32 contexts, means over lists."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from recsys_topk.processes import divisor

LOG2 = math.log(2.0)

# Sums of weights that differ by less than this part of them are equal: ten weights of 0.1 reach 1.
SLACK = 8.0 * 2.0**-23

# exp and log1p are up to sixty times slower where the result is a subnormal number. Exponents are clamped to these
# bounds: above them the functions are fast, and smaller values are negligible in every sum they enter.
LOWEST_EXPONENT = {torch.float32: -80.0, torch.float64: -700.0}

_NULL_CONTEXT = contextlib.nullcontext()


def full_mask(scores: Tensor) -> Tensor:
    """Return an all-true mask of the shape of `scores` that occupies one byte.

    The mask is one element expanded to (B, N). `is_full` recognises it, so code with a cheaper unmasked path can use
    that path. All other code sees an ordinary boolean mask.
    """
    return torch.ones((), dtype=torch.bool, device=scores.device).expand(scores.shape)


def is_full(mask: Tensor) -> bool:
    """Return whether `mask` was made by `full_mask`. Only the strides are inspected, so there is no device sync.

    Example:
        >>> is_full(full_mask(torch.zeros(2, 3))), is_full(torch.ones(2, 3, dtype=torch.bool))
        (True, False)
    """
    return all(stride == 0 for stride in mask.stride())


def float32_island(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which autocast is off, or a null context if autocast is off already."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NULL_CONTEXT


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0 without cancellation, with finite gradients wherever the value is finite.

    Uses log(-expm1(x)) near zero and log1p(-exp(x)) elsewhere (Mächler 2012). At x = 0 the value is -inf and the
    gradient 0; at x = -inf the value is 0 and the gradient 0.

    Example:
        >>> log1mexp(torch.tensor([-1e-8, -1.0]))
        tensor([-18.4207,  -0.4587])
    """
    near = x > -LOG2
    near_safe = torch.where(near & (x < 0), x, -LOG2)
    far_safe = torch.where(near, -LOG2, x)
    value = torch.where(near, torch.log(-torch.expm1(near_safe)), torch.log1p(-torch.exp(far_safe)))
    return torch.where(x < 0, value, -math.inf)


def add_eps(x: Tensor, eps: float) -> Tensor:
    """Return log(exp(x) + eps), and `x` itself for eps = 0.

    Example:
        >>> add_eps(torch.tensor([-float("inf"), 0.0]), 0.5)
        tensor([-0.6931,  0.4055])
    """
    return torch.logaddexp(x, torch.full_like(x, math.log(eps))) if eps else x


def masked_logsumexp(x: Tensor, mask: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """Return log sum exp of the entries of `x` where `mask` is True; -inf, with zero gradient, if there are none."""
    filled = torch.where(mask, x, -math.inf)
    anything = mask.any(dim, keepdim=True)
    value = torch.logsumexp(torch.where(anything, filled, 0.0), dim, keepdim=True)
    value = torch.where(anything, value, -math.inf)
    return value if keepdim else value.squeeze(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Return the mean of `x` over the entries where `mask` is True; 0 if there are none."""
    if is_full(mask):
        return x.mean(dim)
    return torch.where(mask, x, 0.0).sum(dim) / mask.sum(dim).clamp_min(1)


def mean_of_lists(values: Tensor) -> Tensor:
    """Return the mean of one value per list, (B,), over all lists: `weighted_mean` with every list counted."""
    return weighted_mean(values, full_mask(values))


def weighted_mean(values: Tensor, counted: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return sum(w v) / sum(w) over the lists that are `counted`; 0, with zero gradient, if none is.

    Inside `recsys_topk.processes.global_batch`, sum(w) is the mean over the processes of their sums.
    """
    weight = counted.to(values.dtype) if weights is None else torch.where(counted, weights.to(values.dtype), 0.0)
    return (torch.where(counted, values, 0.0) * weight).sum() / divisor(weight.sum(), values.dtype)
