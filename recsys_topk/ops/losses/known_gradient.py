"""Losses of lists whose gradient was computed together with their value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import apply, is_last_backward, through_reference, wants_graph


def known_gradient(
    scores: Tensor, value: Tensor, gradient: Tensor | None, formula: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `value` with `gradient` as its derivative with respect to the scores.

    Args:
        scores: (B, N).
        value: (B,), or (T, B) for T terms per list.
        gradient: (B, N), or (T, B, N); None = not differentiable. The backward may overwrite it.
        formula: Differentiable function from the scores to the value, used for second derivatives.
    """
    if gradient is None:
        return value
    if torch.compiler.is_compiling():  # a function whose value is `value` and whose gradient is `gradient`
        change = torch.where(gradient == 0, 0.0, (scores - scores.detach()) * gradient.detach())
        return value.detach() + change.sum(-1)
    found: Tensor = apply(_KnownGradient, scores, value, gradient, formula)
    return found


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, value: Tensor, gradient: Tensor, formula: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(scores, gradient)
        ctx.formula = formula
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scores, gradient = ctx.saved_tensors
        found: Tensor | None
        if wants_graph():
            found = through_reference(ctx.formula, [scores], [upstream])[0]
        else:
            found = gradient.mul_(upstream[..., None]) if is_last_backward() else gradient * upstream[..., None]
            found = found.sum(0) if found.dim() > 2 else found
        return found, None, None, None
