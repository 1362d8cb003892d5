"""The common part of the kernels of the top-k losses: all but the formula of a law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.build import inlined, native
from recsys_topk.ops.backends.compiled.memory import read, write
from recsys_topk.ops.backends.compiled.selection import begin_list
from recsys_topk.ops.backends.compiled.tasks import clear, list_kernel


@inlined
def loss_rows(buffer: Any, size: Any) -> Any:
    """Return the addresses of scores, signs, a third row and weights in a buffer, of `size` float32 each."""
    row = 4 * size
    return buffer, buffer + row, buffer + 2 * row, buffer + 3 * row


def loss_kernel(law: int, list_loss: Callable[..., Any], weighted: bool) -> native:
    """Make the kernel of a loss from a function of one list.

    Args:
        law: The law, a constant of the kernel.
        list_loss: An inlined function. It writes the gradient of a list that counts and returns the loss. Its arguments
            are the law, the task, the buffer of the thread (see `loss_rows`), the address of the weights (0 = none),
            the address of the gradient (0 = not wanted), and the facts of `begin_list`.
        weighted: Whether the items have weights, a constant of the kernel.
    """

    def one_list(task: Any, b: Any, buffer: Any) -> Any:
        n, size, before = task.items, task.size, b * task.items
        v, s, w, weights = loss_rows(buffer, size)
        q = weights if weighted else 0
        x, y = task.scores + 4 * before, task.labels + 4 * before
        mask = task.mask + before if task.mask != 0 else 0
        gradient = task.gradient + 4 * before if task.gradient != 0 else 0
        k = read(task.ks, b, np.float64) if task.ks != 0 else np.float64(task.k)
        state, facts = begin_list(law, x, y, mask, task.weights + 4 * before, n, size, k, -1, task.above, v, s, w, q)
        loss = 0.0
        if state == 1:
            loss = list_loss(law, task, buffer, q, gradient, facts)
        elif gradient != 0:
            clear(gradient, n)
        write(task.losses, b, np.float32(loss))
        write(task.counted, b, np.uint8(1 if state > 0 else 0))
        return np.nan if state < 0 else np.float64(state > 0), loss

    one_list.__name__ = one_list.__qualname__ = f"{list_loss.__name__}{'_weighted' * weighted}"
    return list_kernel(inlined(one_list))
