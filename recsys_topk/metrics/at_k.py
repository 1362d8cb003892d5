"""Base class of the metrics with a cut-off k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from recsys_topk.metrics.mean import ListMean


class MeanAtK(ListMean):
    """Mean over lists of a function of scores and labels with a cut-off k. A subclass sets `name` and `measure`.

    Class attributes:
        measure: A function of scores, labels, mask and the `options`. It returns one value per list and the lists that
            are counted.

    Args:
        k: Cut-off; None = no cut-off.
        positive_above: Items with a label above this are positive.
    """

    measure: ClassVar[Callable[..., tuple[Tensor, Tensor]]]

    def __init__(self, k: int | None = None, positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.positive_above = k, positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return self.name if self.k is None else f"{self.name}@{self.k}"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `measure`."""
        return {"k": self.k, "positive_above": self.positive_above}

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*type(self).measure(scores, labels, mask, **self.options))
