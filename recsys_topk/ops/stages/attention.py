"""DIN's attention logits without the (B, N, L, H) tensor of the textbook form.

There are two equivalent implementations: a compiled loop for float32 on a CPU, and blocks of torch operations for all
other cases. The loop processes four candidates at a time, so that a row of the history is read once for four of them.
The last group of a list is padded with the last candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recsys_topk.numerics import at_least_float32, float32_island
from recsys_topk.ops.backends.jit import ZERO, Floats, Integers, jit
from recsys_topk.ops.backends.parallel import add_up, checked, number_of_parts, run_parts
from recsys_topk.ops.dispatch import apply, is_float32, operation, through_reference, wants_graph
from recsys_topk.ops.stages.pooled_dot import gather

# On a CPU a block should fit the L2 cache (measured: 640 KB to 1.3 MB is best); on a GPU it has to fit the memory.
_CPU_BYTES = 5 * 2**18
_GPU_BYTES = 256 * 2**20

# One pass in place, instead of a comparison and a slow broadcast multiplication.
_relu_backward = torch.ops.aten.threshold_backward.grad_input


def _blocks(history: Tensor, items: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield blocks (lists, items): several whole lists, or a part of one long list."""
    size, length, width = history.shape
    number = items.shape[1]
    per_item = max(1, length * width * history.element_size())
    budget = _CPU_BYTES if history.device.type == "cpu" else _GPU_BYTES
    lists = max(1, budget // max(1, per_item * number))
    part = number if lists > 1 else max(1, min(number, budget // per_item))
    for start in range(0, size, lists):
        for first in range(0, number, part):
            yield slice(start, min(start + lists, size)), slice(first, min(first + part, number))


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, history: Tensor, items: Tensor, weight: Tensor, candidates: Tensor, lengths: Tensor
    ) -> Tensor:
        ctx.save_for_backward(history, items, weight, candidates, lengths)
        logits = history.new_empty(*candidates.shape, history.shape[1])
        arrays = [x.numpy() for x in (history, lengths, items, candidates, weight, logits)]
        run_parts(attention_forward, len(history), *arrays)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        history, items, weight, candidates, lengths = ctx.saved_tensors
        if wants_graph():
            whole = through_reference(
                lambda h, i, w: _textbook(h, gather(i, candidates), w), (history, items, weight), [grad]
            )
            return (*whole, None, None)
        parts = number_of_parts(len(history))
        grad_history = torch.zeros_like(history)
        grad_items, grad_weight = items.new_zeros(parts, *items.shape), weight.new_zeros(parts, *weight.shape)
        inputs = (history, lengths, items, candidates, weight, grad.contiguous())
        scratch = weight.new_empty(parts, 4, *weight.shape)  # a loop must not allocate memory
        outputs = (grad_history, grad_items, grad_weight, scratch)
        run_parts(attention_backward, len(history), *(x.numpy() for x in (*inputs, *outputs)))
        summed = add_up(grad_items)
        whole_weight = grad_weight.sum(0) + (summed * items).sum(0)
        return grad_history, summed.mul_(weight), whole_weight, None, None


class _Blocked(torch.autograd.Function):
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With o = [history + items > 0] and s = grad o: dL/dhistory = w sum_n s, dL/ditems = w sum_l s.

        dL/dw = sum s (history + items) is computed from the same two sums, without another pass over the block.
        """
        history, items, weight = ctx.saved_tensors
        if wants_graph():
            return through_reference(_textbook, ctx.saved_tensors, [grad])
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
    """Return a buffer for views + queries; `buffer` itself if it has the right shape."""
    shape = (views.shape[0], queries.shape[1], views.shape[2], views.shape[3])
    return buffer if buffer.shape == shape else views.new_empty(shape)


def attention_logits(history: Tensor, items: Tensor, weight: Tensor, candidates: Tensor, lengths: Tensor) -> Tensor:
    """Return relu(history_bl + items_c(b,n)) . weight for every list b, candidate n and view l, (B, N, L).

    This equals the two-layer perceptron on the concatenation [view, item]; the first layer was applied to view and
    item separately. Memory is O(B N L), not O(B N L H). Logits of views that do not exist are finite, without meaning.

    Args:
        history: Contribution of each view to the first layer, with the bias, (B, L, H).
        items: Contribution of each pool item to the first layer, (M, H).
        weight: The second layer, (H,).
        candidates: Rows of the pool, (B, N).
        lengths: Number of views, (B,); real views come before padding.
    """
    with float32_island(history.device.type):
        history, items, weight = (at_least_float32(x).contiguous() for x in (history, items, weight))
        return logits(history, items, weight, candidates, lengths)


@operation
def logits(history: Tensor, items: Tensor, weight: Tensor, candidates: Tensor, lengths: Tensor) -> Tensor:
    """Return the result of `attention_logits` for contiguous input of one dtype, computed in cache-sized blocks."""
    if torch.compiler.is_exporting():  # the number of blocks depends on shapes that are dynamic in an exported program
        return _textbook(history, gather(items, candidates), weight)
    blocked: Tensor = apply(_Blocked, history, gather(items, candidates), weight)
    return blocked


@logits.backend("numba", lambda history, items, weight, candidates, lengths: is_float32(history, items, weight))
def _numba(history: Tensor, items: Tensor, weight: Tensor, candidates: Tensor, lengths: Tensor) -> Tensor:
    candidates = checked(candidates, len(items), "candidates")
    lengths = checked(lengths, history.shape[1] + 1, "history lengths")
    made: Tensor = apply(_Compiled, history, items, weight, candidates, lengths)
    return made


def _textbook(history: Tensor, items: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of gathered items, (B, N, H), computed with the whole (B, N, L, H) tensor."""
    return torch.relu(history[:, None] + items[:, :, None]) @ weight


@jit
def attention_forward(
    part: int,
    first: int,
    last: int,
    history: Floats,
    lengths: Integers,
    items: Floats,
    candidates: Integers,
    weight: Floats,
    logits: Floats,
) -> None:
    """logits[b, n, l] = sum_h weight_h relu(history[b, l, h] + items[candidates[b, n], h]) for first <= b < last.

    Views at or after lengths[b] get 0.
    """
    width, number = history.shape[2], candidates.shape[1]
    for b in range(first, last):
        logits[b, :, lengths[b] :] = ZERO
        for n in range(0, number, 4):
            n1, n2, n3 = min(n + 1, number - 1), min(n + 2, number - 1), min(n + 3, number - 1)
            q0, q1 = items[candidates[b, n]], items[candidates[b, n1]]
            q2, q3 = items[candidates[b, n2]], items[candidates[b, n3]]
            for l in range(lengths[b]):  # noqa: E741
                view = history[b, l]
                s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
                for h in range(width):
                    x, w = view[h], weight[h]
                    y0, y1, y2, y3 = x + q0[h], x + q1[h], x + q2[h], x + q3[h]
                    s0 += (ZERO if y0 < ZERO else y0) * w
                    s1 += (ZERO if y1 < ZERO else y1) * w
                    s2 += (ZERO if y2 < ZERO else y2) * w
                    s3 += (ZERO if y3 < ZERO else y3) * w
                logits[b, n, l] = s0
                logits[b, n1, l] = s1
                logits[b, n2, l] = s2
                logits[b, n3, l] = s3


@jit
def attention_backward(
    part: int,
    first: int,
    last: int,
    history: Floats,
    lengths: Integers,
    items: Floats,
    candidates: Integers,
    weight: Floats,
    grad: Floats,
    grad_history: Floats,
    grad_items: Floats,
    grad_weight: Floats,
    scratch: Floats,
) -> None:
    """Add the gradients of `attention_forward`, with s = grad [history + items > 0].

    grad_history = weight sum_n s. grad_items is stored without the factor weight (sum_l s, summed over the lists).
    grad_weight gets only the contribution of the history to sum s (history + items). The caller completes both from
    the sums. Lists share items and weight, so that each part adds to its own grad_items[part] and grad_weight[part].
    """
    width, number = history.shape[2], candidates.shape[1]
    sums = scratch[part]
    a0, a1, a2, a3 = sums[0], sums[1], sums[2], sums[3]
    for b in range(first, last):
        for n in range(0, number, 4):
            n1, n2, n3 = min(n + 1, number - 1), min(n + 2, number - 1), min(n + 3, number - 1)
            q0, q1 = items[candidates[b, n]], items[candidates[b, n1]]
            q2, q3 = items[candidates[b, n2]], items[candidates[b, n3]]
            sums[:] = ZERO
            for l in range(lengths[b]):  # noqa: E741
                view, out = history[b, l], grad_history[b, l]
                g0 = grad[b, n, l]
                g1 = grad[b, n1, l] if n + 1 < number else ZERO
                g2 = grad[b, n2, l] if n + 2 < number else ZERO
                g3 = grad[b, n3, l] if n + 3 < number else ZERO
                for h in range(width):
                    x = view[h]
                    s0 = g0 if x + q0[h] > ZERO else ZERO
                    s1 = g1 if x + q1[h] > ZERO else ZERO
                    s2 = g2 if x + q2[h] > ZERO else ZERO
                    s3 = g3 if x + q3[h] > ZERO else ZERO
                    a0[h] += s0
                    a1[h] += s1
                    a2[h] += s2
                    a3[h] += s3
                    out[h] += (s0 + s1) + (s2 + s3)
            for i in range(min(4, number - n)):
                target, total = grad_items[part, candidates[b, n + i]], sums[i]
                for h in range(width):
                    target[h] += total[h]
        for l in range(lengths[b]):  # noqa: E741
            view, out = history[b, l], grad_history[b, l]
            for h in range(width):
                grad_weight[part, h] += out[h] * view[h]
                out[h] *= weight[h]
