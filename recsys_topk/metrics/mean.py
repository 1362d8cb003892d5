"""The base class of all metrics, which keeps a sum over lists and two counts, and the metric registry."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from recsys_topk.registry import Registry

registry: Registry[ListMean]


class ListMean(Metric):  # type: ignore[misc]  # torchmetrics is untyped here
    """Mean over lists. The state is a float64 sum, an int64 count, and an int64 count of the skipped lists.

    All three are summed over batches and processes, so the result depends on neither the batch size nor the number of
    processes. A subclass implements `update` and passes one value per list to `add`. The result is NaN if no list is
    counted.

    A subclass that sets `name` can be configured by that name (`recsys_topk.metrics.configured`). Its arguments ``k``,
    ``m``, ``quotas`` and ``positive_above`` then default to the values of the cascade.

    Class attributes:
        name: Registry name.
        whole_cascade: `update` takes the scores of all stages, one (B, N) tensor per stage, instead of one tensor.

    Attributes:
        skipped: Number of skipped lists so far in this process, int64 scalar.
        stage: Index of the stage whose scores a configured metric gets; None = not a metric of one stage.
        lists: If it is a list, `add` appends the values of each batch, (B,) on the CPU, NaN for skipped lists.
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
        self.lists: list[Tensor] | None = None
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @property
    def label(self) -> str:
        """Name of the metric in logs, with the numbers that define it, e.g. ``recall@10@30``."""
        return self.name

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add one value per list, (B,). Lists that are not `counted` increase `skipped`."""
        self.total += torch.where(counted, values, 0.0).sum(dtype=torch.float64)
        included = counted.sum()
        self.count += included
        self.skipped += counted.numel() - included
        if self.lists is not None:
            self.lists.append(torch.where(counted, values, torch.nan).cpu())

    def compute(self) -> Tensor:
        """Return the mean over all counted lists, a float32 scalar."""
        return (self.total / self.count).float()


registry = Registry("metric", "recsys_topk.metrics", "recsys_topk.metrics", ListMean)
