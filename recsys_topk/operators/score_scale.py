"""The scale of the scores, measured on the first training batches: the temperature ``tau="auto"``."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from recsys_topk.numerics import full_mask
from recsys_topk.processes import total

Tau = float | Literal["auto"]

# Number of training batches after which the temperature is fixed.
BATCHES = 10


def squared_deviations(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the sum of the squared deviations of valid scores from the mean of their list, and their number, (2,).

    Example:
        >>> squared_deviations(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
        tensor([2., 3.], dtype=torch.float64)
    """
    valid = full_mask(scores) if mask is None else mask
    x = torch.where(valid, scores.detach(), 0.0).double()
    items = valid.sum(-1, keepdim=True)
    apart = torch.where(valid, x - x.sum(-1, keepdim=True) / items.clamp_min(1), 0.0)
    return torch.stack([apart.square().sum(), items.sum().double()])


def updated_scale(state: Tensor, spread: Tensor, store: bool) -> tuple[float | None, bool]:
    """Return the standard deviation of the scores over the stored batches, and whether it is fixed. Add this batch.

    Reads the tensors. Inside `recsys_topk.processes.global_batch` the scores of all processes count.

    Args:
        state: (2,), the mean variance and the number of stored batches; changed in place if `store`.
        spread: (2,), see `squared_deviations`.
        store: Whether to store this batch. A stored state of `BATCHES` batches does not change.

    Example:
        >>> state = torch.zeros(2)
        >>> updated_scale(state, torch.tensor([8.0, 2.0]), store=True), state
        ((2.0, False), tensor([4., 1.]))

    Returns:
        The deviation, of this batch alone if none is stored (None if it is 0 or not finite); and whether it is fixed.
    """
    mean, batches = state.tolist()
    if batches < BATCHES:
        squares, items = total(spread).tolist()
        variance = squares / max(items, 1.0)
        if 0.0 < variance < math.inf:
            if batches == 0 or store:
                mean += (variance - mean) / (batches + 1)
            if store:
                state.copy_(torch.tensor([mean, batches + 1]))
                mean, batches = state.tolist()
    return math.sqrt(mean) if mean > 0.0 else None, batches >= BATCHES
