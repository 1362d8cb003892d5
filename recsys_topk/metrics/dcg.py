"""DCG at k."""

from __future__ import annotations

from typing import Any, ClassVar

from recsys_topk.metrics.at_k import MeanAtK
from recsys_topk.metrics.functional import dcg_at
from recsys_topk.ops.losses.dcg import Gain, check_gain


class DCGAt(MeanAtK):
    """DCG@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.dcg_at`.

    Args:
        k: Cut-off; None = no cut-off.
        gain: ``"exponential"`` (2^y - 1) or ``"linear"`` (y).
        positive_above: Lists without a label above this are skipped.

    Example:
        >>> import torch
        >>> metric = DCGAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.6309)
    """

    name: ClassVar[str] = "dcg"
    measure = dcg_at

    def __init__(self, k: int | None = None, gain: Gain = "exponential", positive_above: float = 0.0) -> None:
        super().__init__(k, positive_above)
        self.gain = check_gain(gain)

    @property
    def options(self) -> dict[str, Any]:
        """See `MeanAtK.options`."""
        return {**super().options, "gain": self.gain}
