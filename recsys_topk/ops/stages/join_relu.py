"""The first layer of a perceptron, computed from the parts of request, pool item and candidate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.backends.jit import ZERO, Floats, Integers, jit
from recsys_topk.ops.backends.parallel import add_up, checked, number_of_parts, run_parts
from recsys_topk.ops.dispatch import apply, is_float32, operation, wants_graph
from recsys_topk.ops.stages.pooled_dot import gather


@operation
def join_relu(own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    """Return relu(own_bn + requests_b + items_c(b,n)), (B N, D): the first layer of a perceptron from its parts.

    Args:
        own: The part of each candidate, (B, N, D), which may be overwritten; None = no such part.
        requests: (B, D).
        items: The pool, (M, D).
        candidates: Rows of the pool, (B, N).
    """
    joined = gather(items, candidates) + requests[:, None]
    return torch.relu(joined if own is None else joined + own).flatten(0, 1)


def _serves(own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> bool:
    return is_float32(requests, items) and (own is None or is_float32(own))


@join_relu.backend("numba", _serves)
def _numba(own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    candidates = checked(candidates, len(items), "candidates")
    own = None if own is None else own.contiguous()
    made: Tensor = apply(_JoinRelu, own, requests.contiguous(), items.contiguous(), candidates)
    return made.flatten(0, 1)


class _JoinRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
        ctx.pool = items.shape
        if own is None:
            hidden = requests.new_zeros(*candidates.shape, requests.shape[1])
        else:
            hidden = own
            ctx.mark_dirty(own)
        arrays = [x.numpy() for x in (hidden.detach(), items, candidates, requests)]
        run_parts(join_forward, len(requests), *arrays)
        ctx.save_for_backward(hidden, candidates)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        hidden, candidates = ctx.saved_tensors
        if wants_graph():  # the result is linear in the gradient, so torch can differentiate it again
            passed = torch.where(hidden > 0, grad, 0.0)
            into = passed.new_zeros(ctx.pool).index_add(0, candidates.flatten(), passed.flatten(0, 1))
            return passed if ctx.needs_input_grad[0] else None, passed.sum(1), into, None
        size, width = len(hidden), hidden.shape[2]
        grad_own = torch.empty_like(hidden)
        grad_items = grad.new_zeros(number_of_parts(size), *ctx.pool)
        grad_requests = grad.new_zeros(size, width)
        inputs, outputs = (hidden.detach(), candidates, grad.contiguous()), (grad_own, grad_items, grad_requests)
        run_parts(join_backward, size, *(x.numpy() for x in (*inputs, *outputs)))
        return grad_own if ctx.needs_input_grad[0] else None, grad_requests, add_up(grad_items), None


@jit
def join_forward(
    part: int, first: int, last: int, hidden: Floats, items: Floats, candidates: Integers, requests: Floats
) -> None:
    """hidden[b, n] = relu(hidden[b, n] + items[candidates[b, n]] + requests[b]), in place, for first <= b < last."""
    width = hidden.shape[2]
    for b in range(first, last):
        request = requests[b]
        for n in range(candidates.shape[1]):
            target, item = hidden[b, n], items[candidates[b, n]]
            for h in range(width):
                x = target[h] + item[h] + request[h]
                target[h] = ZERO if x < ZERO else x


@jit
def join_backward(
    part: int,
    first: int,
    last: int,
    hidden: Floats,
    candidates: Integers,
    grad: Floats,
    grad_hidden: Floats,
    grad_items: Floats,
    grad_requests: Floats,
) -> None:
    """Write grad [hidden > 0] to grad_hidden, and add it to the sums by pool item, grad_items[part], and by request."""
    width = hidden.shape[2]
    for b in range(first, last):
        request = grad_requests[b]
        for n in range(candidates.shape[1]):
            value, upstream, target = hidden[b, n], grad[b, n], grad_hidden[b, n]
            item = grad_items[part, candidates[b, n]]
            for h in range(width):
                s = upstream[h] if value[h] > ZERO else ZERO
                target[h] = s
                item[h] += s
                request[h] += s
