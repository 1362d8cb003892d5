"""The batch that every stage, objective and metric sees: requests, a pool of items, and lists of indices into it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CascadeBatch:
    """B requests, each with a list of N candidates that are indices into a pool of M distinct items.

    An item is stored, embedded and encoded once, however many lists it stands in; adding negatives appends columns of
    indices and copies no features. Padding slots are masked, have label 0, group -1 and point at pool row 0.

    Attributes:
        request_id: (B,) int64, the identity of each request.
        request: (B, F_r) ids of the request's features, in the order of `Schema.request`.
        history: (B, L, F_h) ids of the user's last views, oldest first; row b holds `history_length[b]` real views,
            first, and padding ids after them.
        history_length: (B,) int64.
        item_id: (M,) int64, the identity of each pool item; no value occurs twice.
        items: (M, F_i) ids of the pool's features, in the order of `Schema.items`.
        candidates: (B, N) int64 indices into the pool.
        labels: (B, N) float32, bigger is better.
        mask: (B, N) boolean, True = a real candidate.
        group: (B, N) int64, which sample group a candidate came from (`Schema.groups`, best first;
            `len(Schema.groups)` = a sampled negative; -1 = padding).
    """

    request_id: Tensor
    request: Tensor
    history: Tensor
    history_length: Tensor
    item_id: Tensor
    items: Tensor
    candidates: Tensor
    labels: Tensor
    mask: Tensor
    group: Tensor

    @property
    def size(self) -> int:
        """Number of requests."""
        return self.candidates.shape[0]

    @property
    def history_mask(self) -> Tensor:
        """(B, L) boolean, True = a real view."""
        steps = torch.arange(self.history.shape[1], device=self.history.device)
        return steps < self.history_length[:, None]

    def replace(self, **changes: Tensor) -> CascadeBatch:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to(self, *args: Any, **kwargs: Any) -> CascadeBatch:
        """Move every tensor to a device (dtypes are kept)."""
        return CascadeBatch(**{f.name: getattr(self, f.name).to(*args, **kwargs) for f in fields(self)})

    def pin_memory(self) -> CascadeBatch:
        """Pin every tensor, for asynchronous copies to a GPU."""
        return CascadeBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})
