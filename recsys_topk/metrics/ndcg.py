"""NDCG at k."""

from __future__ import annotations

from typing import ClassVar

from recsys_topk.metrics.dcg import DCGAt
from recsys_topk.metrics.functional import ndcg_at


class NDCGAt(DCGAt):
    """NDCG@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.ndcg_at`.

    The arguments are those of `DCGAt`.

    Example:
        >>> import torch
        >>> metric = NDCGAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.6309)
    """

    name: ClassVar[str] = "ndcg"
    measure = ndcg_at
