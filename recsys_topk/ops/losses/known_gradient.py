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
        value: (B,), (T, B) for T terms per list, or a scalar.
        gradient: (B, N), or (T, B, N); None = not differentiable. The backward may overwrite it.
        formula: Differentiable function from the scores to the value, used for second derivatives.
    """
    if gradient is None:
        return value
    if torch.compiler.is_compiling():  # a function whose value is `value` and whose gradient is `gradient`
        change = torch.where(gradient == 0, 0.0, (scores - scores.detach()) * gradient.detach())
        return value.detach() + change.sum(-1)
    found: Tensor = apply(_KnownGradient, scores, [value, gradient], formula)
    return found


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, known: list[Tensor], formula: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(scores)
        value = known.pop(0)
        # The last backward takes the gradient out of the list. Autograd does not copy a tensor with no other reference.
        ctx.gradient, ctx.formula = known, formula
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            return through_reference(ctx.formula, ctx.saved_tensors, [upstream])[0], None, None
        if not is_last_backward():
            found = ctx.gradient[0] * upstream[..., None]
        else:
            found = ctx.gradient.pop()
            if upstream.dim() or upstream.item() != 1.0:
                found.mul_(upstream[..., None])
        return found.sum(0) if found.dim() > 2 else found, None, None
