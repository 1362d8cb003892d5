"""The state that all metrics share: a sum over lists and two counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class ListMean(Metric):  # type: ignore[misc]  # torchmetrics is untyped here
    """Mean over lists: a float64 sum, an int64 count, and an int64 count of the lists that were left out.

    All three add up over batches and processes, so the result depends on neither the batch size nor the number of
    processes. A subclass writes `update` and passes per-list values to `add`. Without any list counted the result is
    NaN.

    Attributes:
        skipped: Lists left out so far (in this process), int64 scalar.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better: bool | None = True
    total: Tensor
    count: Tensor
    skipped: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add one value a list, (B,); lists that are not `counted` go to `skipped`."""
        self.total += torch.where(counted, values, 0.0).sum(dtype=torch.float64)
        included = counted.sum()
        self.count += included
        self.skipped += counted.numel() - included

    def compute(self) -> Tensor:
        """Return the mean over all lists counted, a float32 scalar."""
        return (self.total / self.count).float()
