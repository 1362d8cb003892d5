"""Lists moved so that their k-th pair lies at 0, where floating point is finest."""

from __future__ import annotations

from torch import Tensor

from recsys_topk.ops.kth_pair import kth_values


def centred(filled: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return x - x_[k+1], (B, N), and x_[k] - x_[k+1], (B, 1); the shift is a constant for the gradient.

    A threshold near 1e7 has a rounding error of 1/2 in float32, however close together the scores are. The difference
    of two scores has none, or one relative to itself. For a membership that does not change when all scores of a list
    are shifted, the gradient is the same.

    Args:
        filled: (B, N), -inf where masked.
        k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items.

    Example:
        >>> import torch
        >>> centred(torch.tensor([[1e7 + 3, 1e7, 1e7 + 1]]), 2)
        (tensor([[3., 0., 1.]]), tensor([[1.]]))
    """
    kept, cut = kth_values(filled, k)
    return filled - cut, kept - cut
