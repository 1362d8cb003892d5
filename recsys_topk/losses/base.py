"""The interface of all ranking losses: scores and labels of lists in, one number out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from recsys_topk.checks import check_finite, check_k, check_lists, may_read
from recsys_topk.numerics import at_least_float32, float32_island, full_mask, is_full, weighted_mean
from recsys_topk.operators.base import TopKOperator
from recsys_topk.registry import Registry
from recsys_topk.spec import Recorded

Reduction = Literal["mean", "sum", "none"]

registry: Registry[RankingLoss]


class RankingLoss(Recorded, nn.Module, ABC):
    """Base of all losses: checks, float32 arithmetic, masks, k, weights and the reduction over lists.

    A subclass sets `name` and the facts below, and writes `per_list`, one formula. Lists are rows. An item is
    *positive* when its label is above `positive_above`. A list without a valid positive item (and, for a loss that
    cuts at k, a list with k = 0 or with no item beyond the k-th) says nothing about the order and is left out of the
    mean; a batch of only such lists gives 0 with zero gradients.

    Class attributes:
        name: Registry name.
        label_kind: ``"graded"`` if the size of a label matters, ``"binary"`` if only positive or not.
        family: ``"top-k"``, ``"listwise"``, ``"pairwise"`` or ``"pointwise"``.
        cost: Time for one list: ``"n"``, ``"n log n"``, ``"k n"`` or ``"n^2"``.
        requires_k: The loss has no meaning without a k.
        paper: Where the loss is from.

    Args:
        k: Where to cut: an int, ``"positives"`` (each list's own number of positives), or None.
        positive_above: Items with a label above this are positive.
        reduction: ``"mean"`` (weighted, over the lists counted), ``"sum"``, or ``"none"`` for (B,) with 0 for lists
            left out.
        validate: Raise on NaN or infinity among valid scores (reads the tensor, so it is off by default).
    """

    name: ClassVar[str]
    label_kind: ClassVar[Literal["graded", "binary"]]
    family: ClassVar[str]
    cost: ClassVar[str]
    requires_k: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    operator: TopKOperator | None

    def __init__(
        self,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float = 0.0,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        if isinstance(k, str) and k != "positives":
            raise ValueError(f"k must be an int, None or 'positives', got {k!r}")
        if k is not None and not isinstance(k, str) and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
            raise ValueError(f"k must be a non-negative int, None or 'positives', got {k!r}")
        self.operator = None
        self.k = k
        self.positive_above = float(positive_above)
        self.reduction: Reduction = reduction
        self.validate = validate

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @abstractmethod
    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """Return the loss of each list, (B,). Called with clean input only.

        Args:
            scores: (B, N), float32 or float64; 0 where masked.
            labels: (B, N), the dtype of scores; 0 where masked. Every list has a positive.
            mask: Boolean (B, N). `recsys_topk.numerics.is_full(mask)` tells that nothing is masked.
            k: One int, an int64 tensor (B,), or None; with `requires_k`, 1 <= k < number of valid items.
        """

    @final  # type: ignore[misc]  # nn.Module declares forward as a writable attribute
    def forward(
        self,
        scores: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        k: int | Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch of lists.

        Args:
            scores: (B, N), any floating dtype.
            labels: (B, N), finite and >= 0; bigger is better.
            mask: Boolean (B, N), True = a real item; None = all are.
            k: Overrides the `k` of the constructor: one int, or one integer a list, (B,).
            weights: (B,), the weight of each list in the mean.

        Returns:
            A scalar, or (B,) under ``reduction="none"``; float32 (float64 for float64 scores).
        """
        check_lists(scores, mask, labels=labels)
        if weights is not None and weights.shape != scores.shape[:1]:
            raise ValueError(f"weights must be one a list, ({scores.shape[0]},), got {tuple(weights.shape)}")
        if k is not None:
            check_k(k, scores, read=self.validate or may_read(scores))
        if self.validate:
            check_finite(scores, full_mask(scores) if mask is None else mask)
        with float32_island(scores.device.type):
            x = at_least_float32(scores)
            y = labels.to(x.dtype)
            if mask is None:
                mask = full_mask(x)
            else:
                x, y = torch.where(mask, x, 0.0), torch.where(mask, y, 0.0)
            positive = y > self.positive_above
            if not is_full(mask):
                positive = positive & mask
            counted = positive.any(-1)
            cut = self._cut(k, positive)
            if self.requires_k:
                if cut is None:
                    raise ValueError(
                        f"the {self.name!r} loss selects the top k and was given no k; "
                        f"pass k to the constructor, {type(self).__name__}(k=10), or to the call"
                    )
                cut, proper = self._cap(cut, mask)
                counted = counted if proper is None else counted & proper
            if not (may_read(x) and bool(counted.all())):
                x, y, mask, cut = self._harmless(x, y, mask, cut, counted)
            if x.numel() == 0 or (self.requires_k and x.shape[1] < 2):
                losses = x.sum(-1) * 0.0
            else:
                losses = self.per_list(x, y, mask, cut)
            return self._reduce(losses, counted, weights)

    def _cut(self, k: int | Tensor | None, positive: Tensor) -> int | Tensor | None:
        chosen = self.k if k is None else k
        return positive.sum(-1) if isinstance(chosen, str) else chosen

    @staticmethod
    def _cap(k: int | Tensor, mask: Tensor) -> tuple[int | Tensor, Tensor | None]:
        """Cap k at the valid items; also return which lists have something to cut (None = all)."""
        if is_full(mask) and not isinstance(k, Tensor) and 0 < k < mask.shape[1]:
            return k, None
        count = mask.sum(-1)
        wanted = torch.minimum(k if isinstance(k, Tensor) else torch.full_like(count, k), count)
        return wanted, (wanted > 0) & (wanted < count)

    def _harmless(
        self, x: Tensor, y: Tensor, mask: Tensor, k: int | Tensor | None, counted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, int | Tensor | None]:
        """Replace lists that are left out by one that every formula digests: equal scores, one positive, k = 1."""
        row = counted[:, None]
        dummy = torch.zeros_like(y)
        dummy[:, :1] = max(self.positive_above, 0.0) + 1.0
        x, y = torch.where(row, x, 0.0), torch.where(row, y, dummy)
        if not is_full(mask):
            mask = mask | ~row
        if isinstance(k, Tensor):
            k = torch.where(counted, k, 1)
        return x, y, mask, k

    def _reduce(self, losses: Tensor, counted: Tensor, weights: Tensor | None) -> Tensor:
        if self.reduction == "mean":
            return weighted_mean(losses, counted, weights)
        losses = torch.where(counted, losses, 0.0)
        if weights is not None:
            losses = losses * weights.to(losses.dtype)
        return losses.sum() if self.reduction == "sum" else losses

    def extra_repr(self) -> str:
        """Show k."""
        return f"k={self.k}"


registry = Registry("loss", "recsys_topk.losses", "recsys_topk.losses")
