"""The interface of cascade objectives: a function from the scores of all stages to a scalar to minimise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from recsys_topk.checks import DeferredChecks, check_count, check_finite, check_lists
from recsys_topk.losses.base import RankingLoss
from recsys_topk.numerics import at_least_float32, float32_island, full_mask
from recsys_topk.ops.dispatch import may_read
from recsys_topk.registry import Registry
from recsys_topk.spec import Recorded

registry: Registry[CascadeObjective]
Weighting = Literal["learned", "fixed"]
Pool = int | Literal["catalogue"]
Quotas = Sequence[int]


@dataclass(frozen=True)
class ObjectiveOutput:
    """The result of an objective.

    Attributes:
        total: The scalar to minimise.
        terms: The unweighted terms by name, as scalars, for logging and diagnostics.
        stage_of: The stage index of each term that belongs to one stage. Such a term is logged under the name of the
            stage.
    """

    total: Tensor
    terms: dict[str, Tensor]
    stage_of: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_stages(cls, total: Tensor, terms: Sequence[Tensor], **others: Tensor) -> ObjectiveOutput:
        """Return the output of an objective with one term per stage, first stage first, and other terms by name."""
        names = [f"stage{m}" for m in range(len(terms))]
        stage_terms = dict(zip(names, terms, strict=True))
        return cls(total, {**stage_terms, **others}, {name: m for m, name in enumerate(names)})


class TermWeights(nn.Module):
    """Weights of the terms of the stages: learned log-variances, or fixed at 1.

    Learned (Kendall et al. 2018): sum_m L_m exp(-w_m) / 2 + w_m / 2, w_m = 0 at the start. The parameter is the
    logarithm of the variance, so a weight cannot cross zero and make the total NaN.

    Args:
        stages: Number of terms.
        weighting: ``"learned"`` or ``"fixed"``.
    """

    def __init__(self, stages: int, weighting: Weighting) -> None:
        super().__init__()
        if weighting not in ("learned", "fixed"):
            raise ValueError(f"weighting must be 'learned' or 'fixed', got {weighting!r}")
        self.log_variance = nn.Parameter(torch.zeros(stages)) if weighting == "learned" else None

    def forward(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum of `terms`."""
        stacked = torch.stack(list(terms))
        if self.log_variance is None:
            return stacked.sum()
        w = self.log_variance.to(stacked.dtype)
        return 0.5 * (stacked * torch.exp(-w) + w).sum()


class CascadeObjective(Recorded, nn.Module, ABC):
    """Base class of all objectives: checks and float32 arithmetic. A subclass implements `compute`.

    Class attributes:
        name: Registry name.
        needs_operator: The objective needs a loss with a top-k operator.
        needs_sum: The membership of this operator must sum to k.
        compares_groups: The objective only compares sample groups, so it needs at least two.
        uses_loss: The objective uses `loss`. False for published baselines with their own terms.
        takes_item_weights: Items may have weights: `compute` takes them, or `compute_weighted` is implemented.
        separate_lists: The stages may train on different lists (`compute_separately`).
        paper: Reference.

    Args:
        loss: The loss of the objective.
        stages: Number of stages.
        pool: Number of items that the deployed cascade selects from: sampled negatives get weights, so that they stand
            for these items (`recsys_topk.cascades.sampled_negatives.pool_weights`). None = sampled negatives count as
            one item each.

    Attributes:
        validate: Raise on NaN or infinity among valid scores. Off by default, because the check reads the tensors.
        deferred_checks: Receives the checks of `validate` on devices other than the CPU, to be evaluated in the next
            step; None = the check is evaluated immediately.
    """

    name: ClassVar[str]
    needs_operator: ClassVar[bool] = False
    needs_sum: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    uses_loss: ClassVar[bool] = True
    takes_item_weights: ClassVar[bool] = False
    separate_lists: ClassVar[bool] = False
    paper: ClassVar[str] = ""

    def __init__(self, loss: RankingLoss, stages: int, pool: Pool | None = None) -> None:
        super().__init__()
        if self.needs_operator and loss.operator is None:
            raise ValueError(
                f"the {self.name!r} objective needs a loss with a top-k operator, but {loss.name!r} has none; "
                f"use --objective independent, or a loss of the top-k family"
            )
        if self.needs_sum and loss.operator is not None and not loss.operator.sums_to_k:
            raise ValueError(
                f"the {self.name!r} objective needs an operator whose membership sums to k, but that of {loss.name!r} "
                f"does not; use --loss sigmoid or --loss lapsum"
            )
        if pool is not None and pool != "catalogue":
            check_count("pool, if it is not 'catalogue',", pool)
        if pool is not None and not loss.takes_item_weights:
            raise ValueError(
                f"the pool of the {self.name!r} objective gives weights to items, but the loss {loss.name!r} does not "
                f"support item_weights; `recsys-topk losses` lists the losses that do"
            )
        self.loss = loss
        self.stages = stages
        self.pool = pool
        self.validate = False
        self.deferred_checks: DeferredChecks | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)
        elif not hasattr(cls, "name"):
            cls.name = cls.__name__  # for run names and messages; only classes that set `name` are registered

    @abstractmethod
    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """Return the objective. The base class calls it with clean input: float32 or float64 scores, 0 where masked."""

    def compute_separately(
        self, scores: Sequence[Tensor], labels: Sequence[Tensor], masks: Sequence[Tensor], quotas: Sequence[int], k: int
    ) -> ObjectiveOutput:
        """Return the objective of stages with different lists. Called as `compute` is, if `separate_lists`."""
        raise NotImplementedError

    def compute_weighted(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, quotas: Quotas, k: int, weights: Tensor
    ) -> ObjectiveOutput:
        """Return the objective of lists of weighted items. Called as `compute` is, if `takes_item_weights`.

        The default is `compute` with the weights as a further argument.
        """
        return self.compute(scores, labels, mask, None, quotas, k, weights)  # type: ignore[call-arg]

    def cuts(self, quotas: Sequence[int], k: int) -> list[int]:
        """Return the cut-off of each stage's term; lists that are not longer are skipped. Empty = no cut-off."""
        if not (self.uses_loss and self.loss.requires_k) or self.loss.k == "positives":
            return []
        return [self.loss.k if isinstance(self.loss.k, int) else k] * self.stages

    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return scores or labels with 0 where masked, so that the values of padding do not matter."""
        return torch.where(mask, values, 0.0)

    @final  # type: ignore[misc]  # nn.Module declares forward as a writable attribute
    def forward(
        self,
        scores: Sequence[Tensor],
        labels: Tensor | Sequence[Tensor],
        mask: Tensor | Sequence[Tensor] | None = None,
        *,
        groups: Tensor | None = None,
        quotas: Sequence[int],
        k: int,
        item_weights: Tensor | None = None,
    ) -> ObjectiveOutput:
        """Return the objective of a batch of lists.

        Args:
            scores: One (B, N) tensor per stage, over the same candidates.
            labels: (B, N), bigger is better. With `separate_lists` also one tensor per stage, and N may differ.
            mask: Boolean (B, N), True = a real item; None = all items are real. One per stage if labels are.
            groups: (B, N), the sample group of each candidate; required by some objectives.
            quotas: Number of items that each stage passes on.
            k: Number of items wanted at the end of the cascade, unless the loss sets its own k.
            item_weights: (B, N), not negative: an item of weight 2 counts as two copies of it, one of weight 0 as
                masked. k and the quotas count weights.
        """
        if item_weights is not None and not (self.takes_item_weights and self.loss.takes_item_weights):
            raise ValueError(
                f"the {self.name!r} objective with the loss {self.loss.name!r} does not support item_weights; use "
                f"'joint' or 'independent' with a loss that does"
            )
        if len(scores) != self.stages or len(quotas) != self.stages:
            raise ValueError(
                f"the objective was built for {self.stages} stages, got {len(scores)} score tensors and "
                f"{len(quotas)} quotas; pass one of each per stage"
            )
        if not isinstance(labels, Tensor):
            assert mask is not None
            return self._separately(scores, labels, list(mask), quotas, k)
        assert mask is None or isinstance(mask, Tensor)
        for stage_scores in scores:
            check_lists(stage_scores, mask, labels=labels, groups=groups, item_weights=item_weights)
        with float32_island(labels.device.type):
            clean = [at_least_float32(stage_scores) for stage_scores in scores]
            y = labels.detach().to(clean[0].dtype)  # labels are constants
            for x in clean:
                self._check_finite(x, mask)
            if mask is None:
                mask = full_mask(y)
            else:
                clean = [self.clean(x, mask) for x in clean]
                y = self.clean(y, mask)
            if item_weights is not None:
                return self.compute_weighted(clean, y, mask, quotas, k, item_weights.detach().to(y.dtype))
            return self.compute(clean, y, mask, groups, quotas, k)

    def _check_finite(self, scores: Tensor, mask: Tensor | None) -> None:
        if self.validate:
            deferred = None if may_read(scores) else self.deferred_checks
            check_finite(scores, full_mask(scores) if mask is None else mask, deferred=deferred)

    def _separately(
        self, scores: Sequence[Tensor], labels: Sequence[Tensor], masks: Sequence[Tensor], quotas: Sequence[int], k: int
    ) -> ObjectiveOutput:
        if not self.separate_lists:
            raise ValueError(
                f"the {self.name!r} objective trains all stages on the same lists, so a stage cannot have "
                f"separate negatives; use --objective independent"
            )
        for x, y, mask in zip(scores, labels, masks, strict=True):
            check_lists(x, mask, labels=y)
        with float32_island(labels[0].device.type):
            clean = [at_least_float32(x) for x in scores]
            for x, mask in zip(clean, masks, strict=True):
                self._check_finite(x, mask)
            clean = [self.clean(x, mask) for x, mask in zip(clean, masks, strict=True)]
            graded = [self.clean(y.detach().to(x.dtype), mask) for x, y, mask in zip(clean, labels, masks, strict=True)]
            return self.compute_separately(clean, graded, masks, quotas, k)


def default_objective(loss: RankingLoss) -> str:
    """Return the name of the objective for a loss if none is named: ``"joint"`` for a loss with a top-k operator.

    Example:
        >>> from recsys_topk.losses import BCELoss, DFTopKLoss
        >>> default_objective(DFTopKLoss()), default_objective(BCELoss())
        ('joint', 'independent')
    """
    return "independent" if loss.operator is None else "joint"


def require_groups(groups: Tensor | None, name: str) -> Tensor:
    """Return `groups`, or raise if they are None; `name` is the name of the objective."""
    if groups is None:
        raise ValueError(
            f"the {name!r} objective needs sample groups, got none; pass groups, (B, N), 0 = the best group, "
            f"or use the 'independent' or 'joint' objective"
        )
    return groups


registry = Registry("objective", "recsys_topk.cascades.objectives", "recsys_topk.objectives", CascadeObjective)
