"""Binary cross-entropy between an operator's membership and the true top k."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator, registry
from recsys_topk.ops.losses.topk_target import topk_target
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.membership import Law


def selection_bce(selection: SoftSelection, target: Tensor) -> Tensor:
    """Return the cross-entropy of each list, (B,): the mean over valid items of -(y log p + (1 - y) log(1 - p)).

    Args:
        selection: The soft membership p.
        target: (B, N), 0 or 1.

    Example:
        >>> log_p, log_q = torch.tensor([[-0.1, -2.0]]), torch.tensor([[-2.0, -0.1]])
        >>> selection_bce(SoftSelection(log_p, log_q, torch.tensor([[True, True]])), torch.tensor([[1.0, 0.0]]))
        tensor([0.1000])
    """
    mask = None if is_full(selection.mask) else selection.mask
    items = target.shape[1] if mask is None else count_true(mask).clamp_min(1)
    chosen = torch.where(target > 0.5, selection.log_p, selection.log_q)
    return -(chosen if mask is None else fill_masked(chosen, mask, 0.0)).sum(1) / items


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _build(operator: str | Mapping[str, Any]) -> TopKOperator:
    if isinstance(operator, str):
        return registry.get(operator)
    unknown = set(operator) - {"class_path", "init_args"}
    if unknown or "class_path" not in operator:
        raise ValueError(
            "the description of an operator must have a class_path and may have init_args, such as "
            f"{{'class_path': 'lapsum', 'init_args': {{'tau': 2.0}}}}; got {dict(operator)!r}"
        )
    return registry.resolve(str(operator["class_path"]))(**operator.get("init_args", {}))


class TopKLoss(RankingLoss):
    """Cross-entropy between the soft membership of a top-k operator and the true top k.

    L = mean over valid items of -(y log p + (1 - y) log(1 - p)), with p the operator's membership at k and y the true
    top k (see `topk_target`). Memberships of exactly 0 and 1 are replaced by 1e-6 and 1 - 1e-6
    (`TopKOperator.bounded`). Every operator has such a loss under its own name (`recsys_topk.losses.from_operator`).

    Args:
        operator: The operator to train: an object, a registry name, or a description
            ``{"class_path": ..., "init_args": {...}}``.
        k: How many items to select; required here or in the call.
        options: See `RankingLoss`.

    Example:
        >>> loss = TopKLoss("lapsum", k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.9665)
    """

    family = "top-k"
    label_kind = "binary"
    requires_k = True
    operator: TopKOperator

    def __init__(self, operator: TopKOperator | str | Mapping[str, Any], **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.operator = operator if isinstance(operator, TopKOperator) else _build(operator)
        law = self.law()
        if law is not None and law.name == "clip":
            _say_once(
                f"the cross-entropy of {self.operator.name!r} gives misplaced items with a membership of 0 or 1 no "
                f"gradient, so it hardly trains; use the loss 'sparse_fy', the convex loss of the same membership"
            )
        self.takes_item_weights = law is not None and self.operator.takes_item_weights

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        target = topk_target(labels, mask, k, self.positive_above)
        return selection_bce(self.clamp(self.operator.select(scores, k, mask)), target)

    def law(self) -> Law | None:
        """Return the law of the operator if this class computes its cross-entropy; see `recsys_topk.losses.fused`."""
        plain = type(self).per_list is TopKLoss.per_list and type(self).clamp is TopKLoss.clamp
        return self.operator.law() if plain else None

    def clamp(self, selection: SoftSelection) -> SoftSelection:
        """Return the selection without memberships of exactly 0 and 1, for the cross-entropy."""
        return self.operator.bounded(selection)
