"""The batch that every stage, objective and metric sees: requests, a pool of items, and lists of indices into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

NO_VALUES = torch.empty(0, 0)
"""What stands for the values of a part of the schema that has no numeric feature and no vector."""


@dataclass(frozen=True)
class CascadeBatch:
    """B requests, each with a list of N candidates that are indices into a pool of M distinct items.

    An item is stored, embedded and encoded once, however many lists contain it; adding negatives appends columns of
    indices and copies no features. Padding slots are masked, have label 0, group -1 and point at pool row 0.

    Attributes:
        request_id: (B,) int64, the identity of each request.
        request: (B, F_r) int64, ids of the request's categorical features and bags (`Schema.id_columns`); the unused
            slots of a bag hold its table's padding id.
        history: (B, L, F_h) int64, ids of the user's last views, oldest first; row b holds `history_length[b]` real
            views, first, and padding ids after them.
        history_length: (B,) int64.
        item_id: (M,) int64, the identity of each pool item; no value occurs twice (see `schema.VARIANT`).
        items: (M, F_i) int64, ids of the pool's categorical features and bags.
        candidates: (B, N) int64 indices into the pool.
        labels: (B, N) float32, bigger is better.
        mask: (B, N) boolean, True = a real candidate.
        group: (B, N) int64, which sample group a candidate came from (`Schema.groups`, best first;
            `len(Schema.groups)` = a sampled negative; -1 = padding).
        request_values: (B, V_r) float32, the request's numeric features and vectors (`Schema.value_columns`), finite;
            (0, 0) if the schema has none, here and below.
        history_values: (B, L, V_h) float32, those of the views; 0 where there is no view.
        item_values: (M, V_i) float32, those of the pool items.
        log_q: (B, N) float32, the logarithm of how likely each sampled candidate was to be in its list, 0 for those
            that were logged (`recsys_topk.datamodules.inclusion`); (0, 0) if nothing is to be corrected.
        sampled: How many of the last columns are sampled negatives.
        shard: Of evaluation batches, the name of the shard that holds all its requests, e.g. a day.
        users: Of evaluation batches, the users as the data call them; empty if the data do not know them.
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
    request_values: Tensor = NO_VALUES
    history_values: Tensor = NO_VALUES
    item_values: Tensor = NO_VALUES
    log_q: Tensor = NO_VALUES
    sampled: int = 0
    shard: str = ""
    users: tuple[int | str, ...] = ()

    @property
    def size(self) -> int:
        """Number of requests."""
        return self.candidates.shape[0]

    @property
    def history_mask(self) -> Tensor:
        """(B, L) boolean, True = a real view."""
        steps = torch.arange(self.history.shape[1], device=self.history.device)
        return steps < self.history_length[:, None]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move every tensor to a device (dtypes are kept)."""
        return self._each(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> Self:
        """Pin every tensor, for asynchronous copies to a GPU."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that `stream` uses every tensor, so that none is reused before it has."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value.record_stream(stream)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{**values, **{name: change(value) for name, value in tensors.items()}})
