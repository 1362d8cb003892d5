"""Cut the pairs of items of a batch into parts of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import may_read

# Number of pairs per chunk. About six such buffers exist at once. On a CPU the share of each thread should stay in its
# cache (measured fastest); on other devices and under compilation a chunk should outweigh its kernel launches.
PAIRS_IN_CACHE = 1 << 16
PAIRS_AT_A_TIME = 1 << 21


def spans(scores: Tensor, rows: Tensor) -> Iterator[slice]:
    """Cut the lists of `scores`, (B, N), into slices of a bounded number of pairs with `rows`, (B, P)."""
    lists, pairs = scores.shape[0], max(1, rows.shape[1] * scores.shape[1])
    budget = min(PAIRS_AT_A_TIME, PAIRS_IN_CACHE * torch.get_num_threads()) if may_read(scores) else PAIRS_AT_A_TIME
    step = max(1, budget // pairs)
    return (slice(start, min(start + step, lists)) for start in range(0, lists, step))


def better_items(candidate: Tensor) -> Tensor:
    """Return indices, (B, P), that include all `candidate` items of every list: the possible first items of a pair.

    P is the largest number of candidates in a list, so that ten positives among a thousand items cost 10 N pairs per
    list instead of N^2. P = N if reading that number would wait for a device.

    Args:
        candidate: Boolean (B, N).
    """
    lists, n = candidate.shape
    count = int(candidate.sum(-1).max()) if may_read(candidate) else n
    # Gathering has a cost: it is worth it only if it saves at least a quarter of the pairs.
    if 4 * count > 3 * n:
        return torch.arange(n, device=candidate.device).expand(lists, n)
    return candidate.to(torch.float32).topk(max(1, count), dim=-1, sorted=False).indices
