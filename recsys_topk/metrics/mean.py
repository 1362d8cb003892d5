"""The state that all metrics share: a sum over lists and two counts; and the table of their names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from recsys_topk.registry import Registry

registry: Registry[ListMean]


class ListMean(Metric):  # type: ignore[misc]  # torchmetrics is untyped here
    """Mean over lists: a float64 sum, an int64 count, and an int64 count of the lists that were left out.

    All three add up over batches and processes, so the result depends on neither the batch size nor the number of
    processes. A subclass writes `update` and passes per-list values to `add`. Without any list counted the result is
    NaN.

    A subclass that sets `name` can be asked for by that name (`recsys_topk.metrics.configured`). Arguments called
    ``k``, ``m``, ``quotas`` and ``positive_above`` are then taken from the cascade unless they are given.

    Class attributes:
        name: Registry name.
        whole_cascade: `update` takes the scores of all stages, one (B, N) tensor per stage, instead of one (B, N).

    Attributes:
        skipped: Lists left out so far (in this process), int64 scalar.
        stage: Number of the stage whose scores a configured metric gets; None = of no single stage.
    """

    name: ClassVar[str]
    whole_cascade: ClassVar[bool] = False

    full_state_update = False
    is_differentiable = False
    higher_is_better: bool | None = True
    total: Tensor
    count: Tensor
    skipped: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stage: int | None = None
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @property
    def label(self) -> str:
        """What the metric is called in logs: its name and the numbers that define it, e.g. ``recall@10@30``."""
        return self.name

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add one value per list, (B,); lists that are not `counted` go to `skipped`."""
        self.total += torch.where(counted, values, 0.0).sum(dtype=torch.float64)
        included = counted.sum()
        self.count += included
        self.skipped += counted.numel() - included

    def compute(self) -> Tensor:
        """Return the mean over all lists counted, a float32 scalar."""
        return (self.total / self.count).float()


registry = Registry("metric", "recsys_topk.metrics", "recsys_topk.metrics", ListMean)
