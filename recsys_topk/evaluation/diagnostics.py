"""Diagnostics of losses and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from recsys_topk.cascades.objectives.base import CascadeObjective
from recsys_topk.metrics.functional import selection_mass
from recsys_topk.ops.losses.topk_target import topk_target


def score_diagnostics(
    objective: CascadeObjective,
    scores: Sequence[Tensor],
    labels: Tensor,
    mask: Tensor,
    *,
    groups: Tensor | None = None,
    quotas: Sequence[int],
    k: int,
    item_weights: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return diagnostics of the scores of one batch and of the objective's gradients.

    - ``selection_mass/STAGE``: mean of sum(p) / k, where p is the membership that the loss's operator gives;
    - ``wrong_sign/STAGE``: share of the true top k whose score the gradient of the total pushes *down*;
    - ``cosine/STAGE/A-B``: cosine between the gradients of two terms with respect to that stage's scores (negative:
      the terms pull against each other).

    Args:
        objective: The objective.
        scores: One (B, N) tensor per stage.
        labels: (B, N).
        mask: Boolean (B, N).
        groups: (B, N) sample groups, where the objective needs them.
        quotas: Number of items that each stage passes on.
        k: Number of items wanted at the end of the cascade.
        item_weights: (B, N), the weights of the items, for objectives with a pool.
        names: Names of the stages; None = stage0, stage1, ...
    """
    names = [f"stage{m}" for m in range(len(scores))] if names is None else names
    leaves = [x.detach().float().requires_grad_() for x in scores]
    with torch.enable_grad():
        output = objective(leaves, labels, mask, groups=groups, quotas=quotas, k=k, item_weights=item_weights)
    total = _gradients(output.total, leaves)
    terms = {name: _gradients(term, leaves) for name, term in output.terms.items()}
    target = topk_target(labels.float(), mask, k, objective.loss.positive_above).bool()
    values: dict[str, float] = {}
    for m, stage in enumerate(names):
        operator = objective.loss.operator
        if operator is not None and objective.uses_loss:
            with torch.no_grad():
                p = operator(leaves[m], k, mask, item_weights=item_weights).p
                mass, counted = selection_mass(p if item_weights is None else p * item_weights, mask, k=k)
            values[f"selection_mass/{stage}"] = (mass[counted].mean() if bool(counted.any()) else mass.sum()).item()
        gradient = total[m]
        pushed = target & (gradient != 0)
        wrong = (pushed & (gradient > 0)).sum() / pushed.sum().clamp_min(1)
        values[f"wrong_sign/{stage}"] = wrong.item()
        acting = {name: parts[m] for name, parts in terms.items() if bool((parts[m] != 0).any())}
        for (a, gradient_a), (b, gradient_b) in combinations(acting.items(), 2):
            cosine = torch.nn.functional.cosine_similarity(gradient_a.flatten(), gradient_b.flatten(), dim=0)
            values[f"cosine/{stage}/{a}-{b}"] = cosine.item()
    return values


def share_below(parameters: Iterable[nn.Parameter], eps: float) -> float:
    """Return the share of non-zero gradient entries whose size is below `eps`; 0 if there are none.

    Adam divides by sqrt(v) + eps: entries far below eps hardly move their parameter. Rows of tables that the batch
    did not touch are exactly zero and do not count.
    """
    small = touched = 0
    for parameter in parameters:
        if parameter.grad is not None:
            size = parameter.grad.detach().abs()
            touched += int((size > 0).sum())
            small += int(((size > 0) & (size < eps)).sum())
    return small / touched if touched else 0.0


def _gradients(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(value, list(leaves), retain_graph=True, materialize_grads=True))
