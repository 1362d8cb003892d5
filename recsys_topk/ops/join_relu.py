"""The first layer of a perceptron from the shares of request, pool item and candidate, without their concatenation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.ops.jit import ZERO, Floats, Integers, jit
from recsys_topk.ops.parallel import checked, kernels, number_of_parts, over_lists
from recsys_topk.ops.pooled_dot import gather


def join_relu(own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    """Return relu(own_bn + requests_b + items_c(b,n)), (B N, D): the first layer of a perceptron from its parts.

    Args:
        own: What each candidate has of its own, (B, N, D), overwritten; None for nothing.
        requests: (B, D).
        items: The pool, (M, D).
        candidates: Rows of the pool, (B, N).
    """
    if not kernels(requests, items, *([] if own is None else [own])):
        joined = gather(items, candidates) + requests[:, None]
        return torch.relu(joined if own is None else joined + own).flatten(0, 1)
    candidates = checked(candidates, len(items), "candidates")
    own = None if own is None else own.contiguous()
    made: Tensor = _JoinRelu.apply(own, requests.contiguous(), items.contiguous(), candidates)  # type: ignore[no-untyped-call]
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
        over_lists(lambda _, first, last: join_forward(first, last, *arrays), len(requests))
        ctx.save_for_backward(hidden, candidates)
        return hidden

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        hidden, candidates = ctx.saved_tensors
        size, width = len(hidden), hidden.shape[2]
        grad_own = torch.empty_like(hidden)
        grad_items = grad.new_zeros(number_of_parts(size), *ctx.pool)
        grad_requests = grad.new_zeros(size, width)
        arrays = [x.numpy() for x in (hidden.detach(), candidates, grad.contiguous(), grad_own)]

        def run(part: int, first: int, last: int) -> None:
            join_backward(first, last, *arrays, grad_items[part].numpy(), grad_requests.numpy())

        over_lists(run, size)
        return grad_own if ctx.needs_input_grad[0] else None, grad_requests, grad_items.sum(0), None


@jit
def join_forward(first: int, last: int, hidden: Floats, items: Floats, candidates: Integers, requests: Floats) -> None:
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
    first: int,
    last: int,
    hidden: Floats,
    candidates: Integers,
    grad: Floats,
    grad_hidden: Floats,
    grad_items: Floats,
    grad_requests: Floats,
) -> None:
    """Write grad [hidden > 0] to grad_hidden, and add it up by pool item and by request."""
    width = hidden.shape[2]
    for b in range(first, last):
        request = grad_requests[b]
        for n in range(candidates.shape[1]):
            value, upstream, target = hidden[b, n], grad[b, n], grad_hidden[b, n]
            item = grad_items[candidates[b, n]]
            for h in range(width):
                s = upstream[h] if value[h] > ZERO else ZERO
                target[h] = s
                item[h] += s
                request[h] += s
