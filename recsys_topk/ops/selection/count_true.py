"""Count the true entries of each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recsys_topk.ops.dispatch import is_real, operation


@operation
def count_true(mask: Tensor) -> Tensor:
    """Return the number of true entries of each row of a boolean (B, N) tensor, (B,) int64.

    Example:
        >>> count_true(torch.tensor([[True, False, True]]))
        tensor([2])
    """
    return mask.sum(-1)


@count_true.backend("numpy", is_real)
def _numpy(mask: Tensor) -> Tensor:
    return torch.from_numpy(count_rows(mask.numpy()))


def count_rows(a: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the number of true entries of each row. numpy adds faster in a narrower integer type."""
    if len(a) == 1:
        return np.array([np.count_nonzero(a)])
    narrow = np.uint16 if a.shape[1] < 2**16 else np.uint32
    counts: npt.NDArray[np.int64] = np.add.reduce(a.view(np.uint8), 1, dtype=narrow).astype(np.int64)
    return counts
