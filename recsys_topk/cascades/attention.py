"""DIN's attention logits without the (B, N, L, H) tensor that the textbook form needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_topk.numerics import at_least_float32, float32_island

# A chunk's buffer should stay in the last-level cache on a CPU; on a GPU it only has to fit.
_CPU_BYTES = 5 * 2**20
_GPU_BYTES = 256 * 2**20


def _chunk(history: Tensor, items: Tensor) -> int:
    per_list = history.shape[1] * items.shape[1] * history.shape[2] * history.element_size()
    budget = _CPU_BYTES if history.device.type == "cpu" else _GPU_BYTES
    return max(4, min(history.shape[0], budget // max(per_list, 1)))


class _AttentionLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: Tensor, items: Tensor, weight: Tensor) -> Tensor:
        chunk = _chunk(history, items)
        logits = history.new_empty(history.shape[0], items.shape[1], history.shape[1])
        buffer = history.new_empty(chunk, items.shape[1], history.shape[1], history.shape[2])
        for start in range(0, history.shape[0], chunk):
            views, queries = history[start : start + chunk], items[start : start + chunk]
            hidden = buffer[: views.shape[0]]
            torch.add(views[:, None], queries[:, :, None], out=hidden).clamp_(min=0.0)
            torch.matmul(hidden, weight, out=logits[start : start + chunk])
        ctx.save_for_backward(history, items, weight)
        return logits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        history, items, weight = ctx.saved_tensors
        chunk = _chunk(history, items)
        grad_history, grad_items = torch.empty_like(history), torch.empty_like(items)
        grad_weight = torch.zeros_like(weight)
        buffer = history.new_empty(chunk, items.shape[1], history.shape[1], history.shape[2])
        for start in range(0, history.shape[0], chunk):
            views, queries, upstream = (x[start : start + chunk] for x in (history, items, grad))
            hidden = buffer[: views.shape[0]]
            torch.add(views[:, None], queries[:, :, None], out=hidden).clamp_(min=0.0)
            grad_weight += hidden.view(-1, hidden.shape[-1]).t() @ upstream.reshape(-1)
            hidden.sign_()  # 1 where the rectifier is open
            grad_history[start : start + chunk] = torch.einsum("bnl,bnlh->blh", upstream, hidden)
            grad_items[start : start + chunk] = torch.einsum("bnl,bnlh->bnh", upstream, hidden)
        return grad_history.mul_(weight), grad_items.mul_(weight), grad_weight


def attention_logits(history: Tensor, items: Tensor, weight: Tensor) -> Tensor:
    """Return relu(history_bl + items_bn) . weight for every list b, item n and view l, (B, N, L).

    Exactly the two-layer perceptron on the concatenation [view, item] whose first layer was applied to each side
    alone. Computed in chunks of lists that fit the cache and recomputed in backward: O(B N L) memory, not O(B N L H).

    Args:
        history: First layer's share of each view, bias included, (B, L, H).
        items: First layer's share of each candidate, (B, N, H).
        weight: The second layer, (H,).
    """
    with float32_island(history.device.type):
        inputs = (at_least_float32(x) for x in (history, items, weight))
        logits: Tensor = _AttentionLogits.apply(*inputs)  # type: ignore[no-untyped-call]
    return logits
