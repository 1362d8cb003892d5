"""The interface of cascade objectives: the scores of all stages in, one number to minimise out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from recsys_topk.checks import DeferredChecks, check_finite, check_lists
from recsys_topk.losses.base import RankingLoss
from recsys_topk.numerics import at_least_float32, float32_island, full_mask
from recsys_topk.ops.dispatch import may_read
from recsys_topk.registry import Registry
from recsys_topk.spec import Recorded

registry: Registry[CascadeObjective]
Weighting = Literal["learned", "fixed"]


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns.

    Attributes:
        total: The scalar to minimise.
        terms: Its parts before weighting, by any name, as scalars (for logging and diagnostics).
        stage_of: The stage whose own term a term is, by the term's name; it is logged by the name of that stage.
    """

    total: Tensor
    terms: dict[str, Tensor]
    stage_of: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_stages(cls, total: Tensor, terms: Sequence[Tensor], **others: Tensor) -> ObjectiveOutput:
        """Return the output of an objective with one term per stage, first to last, and perhaps others by name."""
        names = [f"stage{m}" for m in range(len(terms))]
        own = dict(zip(names, terms, strict=True))
        return cls(total, {**own, **others}, {name: m for m, name in enumerate(names)})


class TermWeights(nn.Module):
    """Weights of the stages' terms: learned as log-variances, or fixed at 1.

    Learned (Kendall et al. 2018): sum_m L_m exp(-w_m) / 2 + w_m / 2, w_m = 0 at the start. The logarithm of the
    variance is the parameter, so a weight cannot cross zero and turn the total into NaN.

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
    """Base of all objectives: checks and float32 arithmetic; a subclass writes `compute` for any number of stages.

    Class attributes:
        name: Registry name.
        needs_operator: The objective asks the loss's operator for memberships.
        compares_groups: The objective learns from differences between sample groups only, so it needs two at least.
        uses_loss: The objective is built from `loss`; otherwise it is a published baseline with terms of its own.
        paper: Where the objective is from.

    Args:
        loss: The loss that the objective is built from.
        stages: Number of stages.

    Attributes:
        validate: Raise on NaN or infinity among valid scores (reads the tensors, so it is off by default).
        later: Where off the CPU the result of `validate` is left for the next step; None = it is read at once.
    """

    name: ClassVar[str]
    needs_operator: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    uses_loss: ClassVar[bool] = True
    paper: ClassVar[str] = ""

    def __init__(self, loss: RankingLoss, stages: int) -> None:
        super().__init__()
        if self.needs_operator and loss.operator is None:
            raise ValueError(
                f"the {self.name!r} objective needs a loss with a top-k operator and {loss.name!r} has none; "
                f"use --objective independent, or a loss of the top-k family"
            )
        self.loss = loss
        self.stages = stages
        self.validate = False
        self.later: DeferredChecks | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)
        elif not hasattr(cls, "name"):
            cls.name = cls.__name__  # for run names and messages; only a name of its own enters the registry

    @abstractmethod
    def compute(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor,
        groups: Tensor | None,
        quotas: Sequence[int],
        k: int,
    ) -> ObjectiveOutput:
        """Return the objective. Called with clean input only: float32 or float64 scores, 0 where masked."""

    def cuts(self, quotas: Sequence[int], k: int) -> list[int]:
        """Return where each stage's term cuts its lists; shorter lists teach it nothing. Empty if it does not cut."""
        if not (self.uses_loss and self.loss.requires_k) or self.loss.k == "positives":
            return []
        return [self.loss.k if isinstance(self.loss.k, int) else k] * self.stages

    def clean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return scores or labels with 0 where masked, so that whatever padding holds does no harm."""
        return torch.where(mask, values, 0.0)

    @final  # type: ignore[misc]  # nn.Module declares forward as a writable attribute
    def forward(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor | None = None,
        *,
        groups: Tensor | None = None,
        quotas: Sequence[int],
        k: int,
    ) -> ObjectiveOutput:
        """Return the objective of a batch of lists.

        Args:
            scores: One (B, N) tensor per stage, over the same candidates.
            labels: (B, N), bigger is better.
            mask: Boolean (B, N), True = a real item; None = all are.
            groups: (B, N), the sample group of each candidate; needed by the objectives that say so.
            quotas: How many items each stage passes on.
            k: How many items are wanted in the end, where the loss names no k of its own.
        """
        if len(scores) != self.stages or len(quotas) != self.stages:
            raise ValueError(
                f"the objective was built for {self.stages} stages and got {len(scores)} scores and "
                f"{len(quotas)} quotas"
            )
        for stage_scores in scores:
            check_lists(stage_scores, mask, labels=labels, groups=groups)
        with float32_island(labels.device.type):
            clean = [at_least_float32(stage_scores) for stage_scores in scores]
            y = labels.to(clean[0].dtype)
            if self.validate:
                for x in clean:
                    later = None if may_read(x) else self.later
                    check_finite(x, full_mask(x) if mask is None else mask, later=later)
            if mask is None:
                mask = full_mask(y)
            else:
                clean = [self.clean(x, mask) for x in clean]
                y = self.clean(y, mask)
            return self.compute(clean, y, mask, groups, quotas, k)


def need_groups(groups: Tensor | None, name: str) -> Tensor:
    """Return `groups`, or raise because the objective `name` cannot do without."""
    if groups is None:
        raise ValueError(
            f"the {name!r} objective trains on sample groups: pass groups, (B, N), 0 = the best group; "
            f"data without groups can be trained with the 'independent' or 'joint' objective"
        )
    return groups


registry = Registry("objective", "recsys_topk.cascades.objectives", "recsys_topk.objectives", CascadeObjective)
