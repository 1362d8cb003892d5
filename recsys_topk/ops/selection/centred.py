"""Shift lists so that their k-th pair is near 0, where rounding errors are smallest, and bound their threshold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.ops.selection.kth_pair import kth_values


def centred(filled: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return x - x_[k+1], (B, N), and x_[k] - x_[k+1], (B, 1). The shift has no gradient.

    A threshold near 1e7 has a rounding error of 1/2 in float32, even if all scores are close together. The difference
    of two scores has a small relative error. The gradient is correct for a membership that does not change when all
    scores of a list are shifted.

    Args:
        filled: (B, N), -inf where masked.
        k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items; or fractions above 0, (B,). If
            m < k < m + 1, x_[m+1] is the score that is selected in part: it is subtracted, and the gap is 0.

    Example:
        >>> import torch
        >>> centred(torch.tensor([[1e7 + 3, 1e7, 1e7 + 1]]), 2)
        (tensor([[3., 0., 1.]]), tensor([[1.]]))
    """
    if not isinstance(k, Tensor) or not k.is_floating_point():
        kept, cut = kth_values(filled, k)
        return filled - cut, kept - cut
    whole = k.long()
    kept, cut = kth_values(filled, whole.clamp_min(1))
    partial = torch.where(whole[:, None] > 0, cut, kept)
    return filled - partial, torch.where((k == whole)[:, None], kept - cut, 0.0)


def threshold_bracket(gap: Tensor, k: Tensor, count: Tensor, tau: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return bounds of the threshold b at which sum_i F((x_i - b) / tau) = k, (B, 1) each.

    F is the logistic or the Laplace distribution function. F is symmetric, and (log F)' is at most 1 everywhere and at
    least 1/2 for negative arguments, so that (log F)'(u) + (log F)'(v) >= 1 for u + v <= 0. Let the list be centred
    (x_[k] = gap, x_[k+1] = 0) and tau = 1. The sum of F over the other items is between F(-b) and (n - k) F(-b). It
    equals the sum of 1 - F over the first k items, which is between F(b - gap) and k F(b - gap). The log of
    F(-b) / F(b - gap) is 0 at gap / 2 and decreases by at least 1 per unit of b. Hence
    gap / 2 - log k <= b <= gap / 2 + log(n - k).

    For a fractional k, m < k < m + 1, with x_[m+1] = 0 and the Laplace F: (n - m) F(-b) >= k - m and
    (m + 1) F(b) >= m + 1 - k.

    Args:
        gap: (B, 1).
        k: (B,) integers or fractions.
        count: (B, 1), valid items n.
        tau: Temperature.

    Example:
        >>> one = torch.ones(1, 1)
        >>> threshold_bracket(2.0 * one, torch.tensor([1]), 2 * one, 1.0)
        (tensor([[1.]]), tensor([[1.]]))
    """
    wanted = k[:, None].to(gap.dtype)
    low, high = 0.5 * gap - tau * torch.log(wanted), 0.5 * gap + tau * torch.log(count - wanted)
    if not k.is_floating_point():
        return low, high
    whole = wanted.floor()
    part = wanted - whole
    lower = tau * torch.log(2.0 * (1.0 - part) / (whole + 1.0)).clamp_max(0.0)
    upper = tau * torch.log(0.5 * (count - whole) / part).clamp_min(0.0)
    return torch.where(part > 0, lower, low), torch.where(part > 0, upper, high)


def halvings(items: int, k: Tensor, dtype: torch.dtype) -> int:
    """Return the number of bisections of `threshold_bracket` after which its middle is within tau / 2 of the threshold.

    The width of the bracket is tau (log k + log(n - k)) <= 2 tau log(n / 2). A fractional k adds the log of the
    smallest positive float.
    """
    width = 2.0 * math.log(max(items, 2) / 2.0)
    if k.is_floating_point():
        width = 2.0 * (math.log(items) - math.log(torch.finfo(dtype).tiny))
    return math.ceil(math.log2(max(width, 1.0)))
