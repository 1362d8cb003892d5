"""Mean average precision at k."""

from __future__ import annotations

from typing import ClassVar

from recsys_topk.metrics.at_k import MeanAtK
from recsys_topk.metrics.functional import average_precision_at


class MAPAt(MeanAtK):
    """MAP@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.average_precision_at`.

    The arguments are those of `MeanAtK`.

    Example:
        >>> import torch
        >>> metric = MAPAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "map"
    measure = average_precision_at
