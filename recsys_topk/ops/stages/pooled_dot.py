"""Operations on lists of indices into a pool of items: gather rows, or multiply them without a copy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.ops.backends.jit import ZERO, Floats, Integers, jit
from recsys_topk.ops.backends.parallel import add_up, checked, number_of_parts, run_parts
from recsys_topk.ops.dispatch import apply, is_float32, operation, through_reference, wants_graph


def gather(pool: Tensor, candidates: Tensor) -> Tensor:
    """Return the rows `candidates` (B, N) of `pool` (M, D), as (B, N, D).

    Implemented as an embedding look-up: its backward adds rows in parallel, while that of indexing is serial on a CPU.
    """
    return F.embedding(candidates, pool)


@operation
def dot(requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    """Return <requests_b, items_c(b,n)>, (B, N).

    Args:
        requests: (B, D).
        items: The pool, (M, D).
        candidates: Rows of the pool, (B, N).
    """
    return torch.bmm(gather(items, candidates), requests[:, :, None]).squeeze(-1)


@dot.backend("numba", lambda requests, items, candidates: is_float32(requests, items))
def _numba(requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    candidates = checked(candidates, len(items), "candidates")
    made: Tensor = apply(_Dot, requests.contiguous(), items.contiguous(), candidates)
    return made


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(requests, items, candidates)
        scores = requests.new_empty(candidates.shape)
        arrays = [x.numpy() for x in (requests, items, candidates, scores)]
        run_parts(dot_forward, len(requests), *arrays)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        requests, items, candidates = ctx.saved_tensors
        if wants_graph():
            return through_reference(dot.reference, ctx.saved_tensors, [grad])
        grad_requests = torch.zeros_like(requests)
        grad_items = items.new_zeros(number_of_parts(len(requests)), *items.shape)
        arrays = [x.numpy() for x in (requests, items, candidates, grad.contiguous(), grad_requests, grad_items)]
        run_parts(dot_backward, len(requests), *arrays)
        return grad_requests, add_up(grad_items), None


@jit
def dot_forward(
    part: int, first: int, last: int, requests: Floats, items: Floats, candidates: Integers, scores: Floats
) -> None:
    """scores[b, n] = requests[b] . items[candidates[b, n]] for first <= b < last."""
    for b in range(first, last):
        request = requests[b]
        for n in range(candidates.shape[1]):
            item = items[candidates[b, n]]
            s = ZERO
            for h in range(request.shape[0]):
                s += request[h] * item[h]
            scores[b, n] = s


@jit
def dot_backward(
    part: int,
    first: int,
    last: int,
    requests: Floats,
    items: Floats,
    candidates: Integers,
    grad: Floats,
    grad_requests: Floats,
    grad_items: Floats,
) -> None:
    """Add the gradients of `dot_forward`, those of the items to grad_items[part]."""
    for b in range(first, last):
        request, own = requests[b], grad_requests[b]
        for n in range(candidates.shape[1]):
            item, target, g = items[candidates[b, n]], grad_items[part, candidates[b, n]], grad[b, n]
            for h in range(request.shape[0]):
                own[h] += g * item[h]
                target[h] += g * request[h]
