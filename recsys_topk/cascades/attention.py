"""DIN's attention logits without the (B, N, L, H) tensor that the textbook form needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recsys_topk.numerics import at_least_float32, float32_island

# A block should stay in the second-level cache on a CPU (measured: 640 KB to 1.3 MB is best); on a GPU it has to fit.
_CPU_BYTES = 5 * 2**18
_GPU_BYTES = 256 * 2**20

# One pass in place where a comparison and a broadcast multiplication would be two, the second a slow one.
_relu_backward = torch.ops.aten.threshold_backward.grad_input


def _blocks(history: Tensor, items: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut lists and items into blocks (lists, items): several whole lists, or a part of one long list."""
    size, length, width = history.shape
    number = items.shape[1]
    per_item = max(1, length * width * history.element_size())
    budget = _CPU_BYTES if history.device.type == "cpu" else _GPU_BYTES
    lists = max(1, budget // max(1, per_item * number))
    part = number if lists > 1 else max(1, min(number, budget // per_item))
    for start in range(0, size, lists):
        for first in range(0, number, part):
            yield slice(start, min(start + lists, size)), slice(first, min(first + part, number))


class _AttentionLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: Tensor, items: Tensor, weight: Tensor) -> Tensor:
        logits = history.new_empty(history.shape[0], items.shape[1], history.shape[1])
        buffer = history.new_empty(0)
        for lists, part in _blocks(history, items):
            views, queries = history[lists, None], items[lists, part, None]
            buffer = _fitting(buffer, views, queries)
            torch.add(views, queries, out=buffer).relu_()
            torch.matmul(buffer, weight, out=logits[lists, part])
        ctx.save_for_backward(history, items, weight)
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With o = [history + items > 0] and s = grad o: dL/dhistory = w sum_n s, dL/ditems = w sum_l s.

        dL/dw = sum s (history + items) follows from the same two sums, with no further pass over the block.
        """
        history, items, weight = ctx.saved_tensors
        grad_history, grad_items = torch.zeros_like(history), torch.empty_like(items)
        buffer = history.new_empty(0)
        for lists, part in _blocks(history, items):
            views, queries = history[lists, None], items[lists, part, None]
            buffer = _fitting(buffer, views, queries)
            torch.add(views, queries, out=buffer)
            upstream = grad[lists, part, :, None].expand_as(buffer)
            _relu_backward(upstream, buffer, 0.0, grad_input=buffer)
            grad_history[lists] += buffer.sum(1)
            torch.sum(buffer, 2, out=grad_items[lists, part])
        grad_weight = (grad_history * history).sum((0, 1)) + (grad_items * items).sum((0, 1))
        return grad_history.mul_(weight), grad_items.mul_(weight), grad_weight


def _fitting(buffer: Tensor, views: Tensor, queries: Tensor) -> Tensor:
    """Return a buffer for views + queries, the given one if it has the shape."""
    shape = (views.shape[0], queries.shape[1], views.shape[2], views.shape[3])
    return buffer if buffer.shape == shape else views.new_empty(shape)


def attention_logits(history: Tensor, items: Tensor, weight: Tensor) -> Tensor:
    """Return relu(history_bl + items_bn) . weight for every list b, item n and view l, (B, N, L).

    Exactly the two-layer perceptron on the concatenation [view, item] whose first layer was applied to each side
    alone. Computed in blocks that fit the cache and recomputed in backward: O(B N L) memory, not O(B N L H).

    Args:
        history: First layer's share of each view, bias included, (B, L, H).
        items: First layer's share of each candidate, (B, N, H).
        weight: The second layer, (H,).
    """
    with float32_island(history.device.type):
        inputs = (at_least_float32(x) for x in (history, items, weight))
        logits: Tensor = _AttentionLogits.apply(*inputs)  # type: ignore[no-untyped-call]
    return logits
