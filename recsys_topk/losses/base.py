"""The interface of all ranking losses: a function from the scores and labels of lists to a number."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, TypedDict, final

import torch
from torch import Tensor, nn

from recsys_topk.checks import (
    check_finite,
    check_fractional_k,
    check_int,
    check_k,
    check_labels,
    check_lists,
    check_weights,
)
from recsys_topk.losses.flat import FlatLists, flat_lists
from recsys_topk.losses.fused import fused_losses
from recsys_topk.losses.item_weights import WeightedItems, weighted_losses
from recsys_topk.losses.label_defaults import LabelDefaults
from recsys_topk.losses.registry import LossRegistry
from recsys_topk.losses.sampled_candidates import SampledCandidates
from recsys_topk.losses.skipped_lists import count_lists, replace_skipped, warn_all_skipped
from recsys_topk.numerics import at_least_float32, float32_island, full_mask, weighted_mean
from recsys_topk.operators.base import TopKOperator
from recsys_topk.operators.score_scale import squared_deviations
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.losses.find_positives import find_positives
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.processes import processes
from recsys_topk.spec import Recorded

Reduction = Literal["mean", "sum", "none"]

registry: LossRegistry


class LossOptions(TypedDict, total=False):
    """Options of every loss; see `RankingLoss`. A loss takes them as ``**options: Unpack[LossOptions]``."""

    k: int | Literal["positives"] | None
    positive_above: float | None
    reduction: Reduction
    validate: bool


class RankingLoss(LabelDefaults, SampledCandidates, WeightedItems, Recorded, nn.Module, ABC):
    """Base class of all losses: checks, float32 arithmetic, masks, k, weights and the reduction over lists.

    A subclass sets the class attributes below and implements the formula in `per_list`. Lists are rows. An item is
    *positive* if its label is above `positive_above`. A list without a valid positive item has no information about the
    order and is skipped: it does not enter the mean. A loss that requires k also skips lists with k = 0 and lists
    without an item beyond the k-th. If all lists of a batch are skipped, the loss is 0 with zero gradients, and a
    warning is issued after the first, the 10th, the 100th, ... such batch. Labels are constants: they get no gradient.
    Only a mask marks padding; a label of -1 is a label, and raises with `validate`.

    Class attributes:
        name: Registry name.
        label_kind: ``"graded"`` if the size of a label matters, ``"binary"`` if a label is only positive or not.
        family: ``"top-k"``, ``"listwise"``, ``"pairwise"`` or ``"pointwise"``.
        cost: Time for one list: ``"n"``, ``"n log n"``, ``"k n"`` or ``"n^2"``.
        requires_k: Whether the loss needs a k.
        stage_k: The default k in a stage of a cascade: ``"k"``, the number of items wanted at the end of the cascade,
            or ``"quota"``, the number of items that the stage passes on.
        takes_item_weights: Items may have weights (`per_list_weighted`).
        paper: Reference.

    Attributes:
        partition_tau: Temperature of the softmax over the list, for losses that a logQ correction for sampled
            candidates applies to; None for all other losses.

    Args:
        k: Cut-off: an int, ``"positives"`` (the number of positives of each list), or None.
        positive_above: Items with a label above this are positive; None = as set by the data, or 0.
        reduction: ``"mean"`` (weighted, over the counted lists), ``"sum"``, or ``"none"`` for (B,) with 0 for skipped
            lists.
        validate: Raise on scores that are not finite, and on labels and weights that are not finite and >= 0. Off by
            default, because the check reads the tensors on the host.
    """

    name: ClassVar[str]
    label_kind: ClassVar[Literal["graded", "binary"]]
    family: ClassVar[str]
    cost: ClassVar[str]
    requires_k: ClassVar[bool] = False
    stage_k: ClassVar[Literal["k", "quota"]] = "k"
    paper: ClassVar[str] = ""
    operator: TopKOperator | None
    _skipped_batches: int = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the loss. Refuse an int that was meant as k."""
        if cls.requires_k and args and type(args[0]) is int and kwargs.get("k") is None:
            first = next(iter(list(inspect.signature(cls.__init__).parameters)[1:]))
            raise TypeError(
                f"{cls.__name__}({args[0]}) would set {first}, not k; write {cls.__name__}(k={args[0]}), "
                f"or {cls.__name__}({first}={float(args[0])}) and pass k to the call"
            )
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        if isinstance(k, str) and k != "positives":
            raise ValueError(f"k must be an int, None or 'positives', got {k!r}")
        if k is not None and not isinstance(k, str):
            k = check_int("k", k)
            if k < 0:
                raise ValueError(f"k must be a non-negative int, None or 'positives', got {k!r}")
            self._arguments["k"] = k
        self.operator = None
        self.k = k
        self._set_threshold(positive_above)
        self.reduction: Reduction = reduction
        self.validate = validate

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)
        elif not hasattr(cls, "name"):
            cls.name = cls.__name__  # for run names and messages; only classes that set `name` are registered

    @abstractmethod
    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """Return the loss of each list, (B,). The base class calls it with clean input.

        Args:
            scores: (B, N), float32 or float64; 0 where masked.
            labels: (B, N), the dtype of scores; 0 where masked. Every list has a positive.
            mask: Boolean (B, N). `recsys_topk.numerics.is_full(mask)` is True if nothing is masked.
            k: One int, an int64 tensor (B,), or None; with `requires_k`, 1 <= k < number of valid items.
        """

    @final  # type: ignore[misc]  # nn.Module declares forward as a writable attribute
    def forward(
        self,
        scores: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        k: float | Tensor | None = None,
        weights: Tensor | None = None,
        item_weights: Tensor | None = None,
        list_ids: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch of lists.

        Lists are rows with a mask, or flat 1-D tensors with `list_ids` or `lengths`. Flat lists are batched by length,
        with fewer than two padded items per item. The value and the gradient equal those of padded rows. The lengths of
        flat lists are read on the host: a GPU is waited for once per call, unless `list_ids` or `lengths` is on the
        CPU.

        Args:
            scores: (B, N), any floating dtype; (T,) for flat lists.
            labels: The shape of scores, finite and >= 0; bigger is better.
            mask: Boolean (B, N), True = a real item; None = all items are real. Not allowed for flat
                lists.
            k: Overrides the `k` of the constructor: one int, or one per list, (B,); with `item_weights` also floats.
            weights: (B,), the weight of each list in the mean.
            item_weights: The shape of scores, not negative, constants for the gradient: an item of weight 2 counts as
                two copies of it, one of weight 0 as masked. k counts weights.
            list_ids: (T,) integers, the list of each item, in any order. Values per list (`k`, `weights`, and the
                result of ``reduction="none"``) are in the order of the sorted ids, as in ``torch.unique(list_ids)``. On
                the device of the scores or on the CPU.
            lengths: (B,) integers, the number of items of each list; the lists are stored one after the other. On the
                device of the scores, on the CPU, or a Python list.

        Returns:
            A scalar, or (B,) for ``reduction="none"``; float32 (float64 for float64 scores).
        """
        if list_ids is not None or lengths is not None:
            lists = flat_lists(scores, labels, mask, list_ids, lengths)
            return self._forward_flat(scores, labels, lists, k, weights, item_weights)
        check_lists(scores, mask, labels=labels, item_weights=item_weights)
        cut = self._check(scores, labels, mask, k, weights, item_weights, scores.shape[0])
        with float32_island(scores.device.type):
            x = at_least_float32(scores)
            y = labels.detach().to(x.dtype)  # labels are constants
            if self.operator is not None and self.operator.measures_tau:
                self.operator.observe(x, squared_deviations(x, mask))
            mean = self.reduction == "mean" and weights is None
            fused = fused_losses(self, x, y, mask, cut, mean, item_weights)
            losses, counted = self._losses(x, y, mask, cut, item_weights) if fused is None else fused
            if counted is not None and may_read(x) and len(x) and not bool(counted.any()):
                longest = y.shape[1] if mask is None else int(count_true(mask).max())
                positives = find_positives(y, mask, self.positive_above)[1]
                self._warn_all_skipped(y if mask is None else y[mask], longest, positives)
            return losses if mean and fused is not None else self._reduce(losses, counted, weights)

    def _forward_flat(
        self,
        scores: Tensor,
        labels: Tensor,
        lists: FlatLists,
        k: float | Tensor | None,
        weights: Tensor | None,
        item_weights: Tensor | None,
    ) -> Tensor:
        if item_weights is not None and item_weights.shape != scores.shape:
            raise ValueError(f"item_weights must be one per item, ({len(scores)},), got {tuple(item_weights.shape)}")
        cut = self._check(scores, labels, None, k, weights, item_weights, len(lists.lengths))
        with float32_island(scores.device.type):
            x = at_least_float32(scores)
            y = labels.detach().to(x.dtype)
            if self.operator is not None and self.operator.measures_tau:
                parts = [squared_deviations(x[items], mask) for _, items, mask in lists.buckets()]
                self.operator.observe(x, torch.stack([x.new_zeros(2).double(), *parts]).sum(0))
            losses, counted = lists.collect(x, y, cut, item_weights, self._losses)
            if may_read(x) and len(counted) and not bool(counted.any()):
                found = [find_positives(y[items], mask, self.positive_above)[1] for _, items, mask in lists.buckets()]
                positives = torch.cat([0 * lists.empty(), *found])
                self._warn_all_skipped(y, int(lists.lengths.max()), positives, stacklevel=6)
            return self._reduce(losses, counted, weights)

    def _losses(
        self, x: Tensor, y: Tensor, mask: Tensor | None, k: int | Tensor | None, item_weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        fused = fused_losses(self, x, y, mask, k, False, item_weights)
        if fused is not None:
            return fused
        if item_weights is not None:
            return weighted_losses(self, x, y, mask, k, item_weights)
        return self._measure(x, y, mask, k)

    def _check(
        self,
        scores: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        k: float | Tensor | None,
        weights: Tensor | None,
        item_weights: Tensor | None,
        lists: int,
    ) -> int | Tensor | None:
        """Check k and weights, and with `validate` all values. Return k."""
        if item_weights is not None and not self.takes_item_weights:
            raise ValueError(
                f"the {self.name!r} loss does not support item_weights{self.no_item_weights}; `recsys-topk losses` "
                f"lists the losses that do"
            )
        if weights is not None and weights.shape != (lists,):
            raise ValueError(f"weights must have one entry per list, shape ({lists},), got {tuple(weights.shape)}")
        wanted: int | Tensor | None = None
        if k is not None:
            check = check_k if item_weights is None else check_fractional_k
            wanted = check(k, scores, lists=lists, read=self.validate or may_read(scores))
        if self.validate:
            valid = full_mask(scores) if mask is None else mask
            check_finite(scores, valid)
            check_labels(labels, valid)
            for name, given in (("weights", weights), ("item_weights", item_weights)):
                if given is not None:
                    check_weights(name, given)
        return wanted

    def _measure(
        self, x: Tensor, y: Tensor, mask: Tensor | None, k: int | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the losses, and which lists are counted (None = all), (B,) each. Clean the input for `per_list`."""
        cut, counted = count_lists(self, y, mask, k)
        if x.numel() == 0 or (self.requires_k and x.shape[1] < 2):
            return x.sum(-1) * 0.0, counted
        valid = full_mask(x) if mask is None else mask
        if mask is not None:
            x, y = fill_masked(x, mask, 0.0), fill_masked(y, mask, 0.0)
        if counted is not None:
            x, y, valid, cut = replace_skipped(x, y, valid, cut, counted, self.positive_above)
        return self.per_list(x, y, valid, cut), counted

    def counted_lists(self, labels: Tensor, mask: Tensor | None = None, *, k: int | Tensor | None = None) -> Tensor:
        """Return which lists this loss counts, boolean (B,). The other lists are skipped: they do not enter the mean.

        A list is counted if it has a valid positive item. If the loss requires k, the list also needs k >= 1 and at
        least one item beyond the k-th.

        Args:
            labels: (B, N).
            mask: Boolean (B, N), True = a real item; None = all items are real.
            k: Overrides the `k` of the constructor.

        Example:
            >>> from recsys_topk.losses import DFTopKLoss
            >>> DFTopKLoss(k=2).counted_lists(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
            tensor([ True, False])
            >>> DFTopKLoss(k=100).counted_lists(torch.tensor([[1.0, 0.0, 0.0]]))
            tensor([False])
        """
        y = at_least_float32(labels)
        check_lists(y, mask)
        counted = count_lists(self, y, mask, k)[1]
        return torch.ones(len(y), dtype=torch.bool, device=y.device) if counted is None else counted

    def _warn_all_skipped(self, labels: Tensor, longest: int, positives: Tensor, stacklevel: int = 5) -> None:
        self._skipped_batches += 1
        warn_all_skipped(self, self._skipped_batches, labels, longest, positives, stacklevel)

    def require_k(self, k: int | Tensor | None) -> int | Tensor:
        """Return k, or raise if it is None."""
        if k is None:
            raise ValueError(
                f"the {self.name!r} loss requires k, got none; "
                f"pass k to the constructor, {type(self).__name__}(k=10), or to the call"
            )
        return k

    def _reduce(self, losses: Tensor, counted: Tensor | None, weights: Tensor | None) -> Tensor:
        if self.reduction == "mean":
            if counted is None and weights is None and processes() == 1:
                lists = losses.shape[0]
                return losses.mean() if lists > 1 else losses.reshape(()) if lists else losses.sum()
            return weighted_mean(losses, full_mask(losses) if counted is None else counted, weights)
        if counted is not None:
            losses = torch.where(counted, losses, 0.0)
        if weights is not None:
            losses = losses * weights.to(losses.dtype)
        # Data parallelism averages gradients over processes; multiplying by their number turns the average into a sum.
        return losses.sum() * processes() if self.reduction == "sum" else losses

    def extra_repr(self) -> str:
        """Show k."""
        return f"k={self.k}"


registry = LossRegistry("loss", "recsys_topk.losses", "recsys_topk.losses", RankingLoss)
