"""How many entries of each row are true."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recsys_topk.ops.dispatch import is_plain


def count_true(mask: Tensor) -> Tensor:
    """Return how many entries of each row of a boolean (B, N) tensor are true, (B,) int64."""
    if not mask.is_cpu or not is_plain(mask):
        return mask.sum(-1)
    return torch.from_numpy(count_rows(mask.numpy()))


def count_rows(a: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return how many entries of each row are true: the narrower the sum, the more bytes numpy adds at once."""
    if len(a) == 1:
        return np.array([np.count_nonzero(a)])
    narrow = np.uint16 if a.shape[1] < 2**16 else np.uint32
    counts: npt.NDArray[np.int64] = np.add.reduce(a.view(np.uint8), 1, dtype=narrow).astype(np.int64)
    return counts
