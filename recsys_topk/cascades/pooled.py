"""Operations on lists of indices into a pool of items: rows gathered, added and multiplied without being copied."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.cascades.compiled import checked, kernels, number_of_parts, over_lists


def gather(pool: Tensor, candidates: Tensor) -> Tensor:
    """Return the rows of `pool` (M, D) that `candidates` (B, N) name, (B, N, D).

    As an embedding look-up: its backward adds rows in parallel, where that of plain indexing is serial on a CPU.
    """
    return F.embedding(candidates, pool)


def dot(requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    """Return <requests_b, items_c(b,n)>, (B, N).

    Args:
        requests: (B, D).
        items: The pool, (M, D).
        candidates: Rows of the pool, (B, N).
    """
    if kernels(requests, items) is None:
        return torch.bmm(gather(items, candidates), requests[:, :, None]).squeeze(-1)
    candidates = checked(candidates, len(items), "candidates")
    made: Tensor = _Dot.apply(requests.contiguous(), items.contiguous(), candidates)  # type: ignore[no-untyped-call]
    return made


def join_relu(own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
    """Return relu(own_bn + requests_b + items_c(b,n)), (B N, D): the first layer of a perceptron from its parts.

    Args:
        own: What each candidate has of its own, (B, N, D), overwritten; None for nothing.
        requests: (B, D).
        items: The pool, (M, D).
        candidates: Rows of the pool, (B, N).
    """
    if kernels(requests, items, *([] if own is None else [own])) is None:
        joined = gather(items, candidates) + requests[:, None]
        return torch.relu(joined if own is None else joined + own).flatten(0, 1)
    candidates = checked(candidates, len(items), "candidates")
    own = None if own is None else own.contiguous()
    made: Tensor = _JoinRelu.apply(own, requests.contiguous(), items.contiguous(), candidates)  # type: ignore[no-untyped-call]
    return made.flatten(0, 1)


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(requests, items, candidates)
        compiled = ctx.compiled = kernels(requests)
        assert compiled is not None
        scores = requests.new_empty(candidates.shape)
        arrays = [x.numpy() for x in (requests, items, candidates, scores)]
        over_lists(lambda _, first, last: compiled.dot_forward(first, last, *arrays), len(requests))
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        requests, items, candidates = ctx.saved_tensors
        grad_requests = torch.zeros_like(requests)
        grad_items = items.new_zeros(number_of_parts(len(requests)), *items.shape)
        arrays = [x.numpy() for x in (requests, items, candidates, grad.contiguous(), grad_requests)]
        over_lists(
            lambda part, first, last: ctx.compiled.dot_backward(first, last, *arrays, grad_items[part].numpy()),
            len(requests),
        )
        return grad_requests, grad_items.sum(0), None


class _JoinRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor) -> Tensor:
        compiled = ctx.compiled = kernels(requests)
        assert compiled is not None
        ctx.pool = items.shape
        if own is None:
            hidden = requests.new_zeros(*candidates.shape, requests.shape[1])
        else:
            hidden = own
            ctx.mark_dirty(own)
        arrays = [x.numpy() for x in (hidden.detach(), items, candidates, requests)]
        over_lists(lambda _, first, last: compiled.join_forward(first, last, *arrays), len(requests))
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
            ctx.compiled.join_backward(first, last, *arrays, grad_items[part].numpy(), grad_requests.numpy())

        over_lists(run, size)
        return grad_own if ctx.needs_input_grad[0] else None, grad_requests, grad_items.sum(0), None
