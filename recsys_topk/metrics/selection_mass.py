"""Total membership of a soft selection relative to k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import selection_mass
from recsys_topk.metrics.mean import ListMean


class SelectionMass(ListMean):
    """sum(p) / k of an operator's membership; mean over lists. See `recsys_topk.metrics.functional.selection_mass`.

    Args:
        k: Number of items to select; capped at the number of valid items of a list.

    Example:
        >>> import torch
        >>> metric = SelectionMass(k=2)
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.4, 0.1]]))
        >>> metric.compute()
        tensor(1.1000)
    """

    higher_is_better: bool | None = None

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def update(self, p: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of selections: p (membership) and mask are (B, N)."""
        self.add(*selection_mass(p, mask, k=self.k))


class StageSelectionMass(SelectionMass):
    """`SelectionMass` of the loss's operator applied to the scores of a stage, as a configured metric.

    Args:
        operator: The operator, a function of scores, k and mask.
        k: Number of items to select; capped at the number of valid items of a list.
    """

    name: ClassVar[str] = "selection_mass"

    def __init__(self, operator: Callable[..., Any], k: int) -> None:
        super().__init__(k)
        self._operator = (operator,)  # in a tuple, so that it is not registered as a submodule of the metric

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return f"{self.name}@{self.k}"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:  # type: ignore[override]
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        super().update(self._operator[0](scores, self.k, mask).p, mask)
