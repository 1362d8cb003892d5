"""The batch that stages, objectives and metrics use: requests, a pool of items, and lists of indices into the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import Self

NO_VALUES = torch.empty(0, 0)
"""The values of a part of the schema without numeric features and vectors."""
NO_ROWS = torch.empty(0, dtype=torch.int64)
"""`CascadeBatch.history_row` and `history_prefix` of a batch in which every request has a history of its own."""


@dataclass(frozen=True)
class CascadeBatch:
    """B requests, each with a list of N candidates. Candidates are indices into a pool of M distinct items.

    An item is stored, embedded and encoded once per batch, even if many lists contain it. Adding negatives appends
    columns of indices and copies no features. Padding slots are masked, have label 0 and group -1, and point to row 0
    of the pool.

    Attributes:
        request_id: (B,) int64, the id of each request.
        request: (B, F_r) int64, ids of the request's categorical features and bags (`Schema.id_columns`). Unused slots
            of a bag contain the padding id of its table.
        history: (B, L, F_h) int64, ids of the user's last views, oldest first. Row b has `history_length[b]` views,
            followed by padding ids.
        history_length: (B,) int64, number of views in each history.
        item_id: (M,) int64, the id of each pool item, all distinct (see `schema.VARIANT`).
        items: (M, F_i) int64, ids of the pool's categorical features and bags.
        candidates: (B, N) int64 indices into the pool.
        labels: (B, N) float32, larger is better.
        mask: (B, N) boolean, True = a real candidate, False = padding.
        group: (B, N) int64, the sample group of each candidate (`Schema.groups`, best first;
            `len(Schema.groups)` = a sampled negative; -1 = padding).
        request_values: (B, V_r) float32, the request's numeric features and vectors (`Schema.value_columns`), finite.
            This field and the next two have shape (0, 0) if the schema has no such features.
        history_values: (B, L, V_h) float32, numeric features and vectors of the views; 0 where there is no view.
        item_values: (M, V_i) float32, numeric features and vectors of the pool items.
        log_q: (B, N) float32, the log-probability that a sampled candidate is in its list; 0 for logged candidates
            (`recsys_topk.datamodules.negatives.inclusion`). Shape (0, 0) if no correction is wanted.
        history_row: (B,) int64. If it is not empty, requests share histories: `history`, `history_values` and
            `history_length` have H rows, and the history of request b is the first `history_prefix[b]` views of row
            `history_row[b]`. So the views of a user are stored and encoded once, however many of them are targets.
        history_prefix: (B,) int64, see `history_row`.
        held_out: (R,) int64, requests that train the later stages of a cascade and not the first one, because the
            first stage knows the positives that it was trained on too well; see `catalogue_terms`.
        known: (B, E) int64, or (H, E) if requests share histories: with `catalogue`, the items that each user has, as
            rows of the pool; -1 = padding.
        sampled: Number of columns, at the end of the lists, that are sampled negatives. With `catalogue`, the number of
            items in the softmax of a step, 0 = all.
        catalogue_items: Number of items of the catalogue that the negatives were drawn from; 0 without `log_q`.
        catalogue: Whether the pool holds the whole catalogue, and all of its items compete with those of each list.
        shard: Name of the shard that contains all requests, e.g. a day. Only set in evaluation batches.
        users: Names of the users in the source; empty if they are not known. Only set in evaluation batches.
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
    history_row: Tensor = NO_ROWS
    history_prefix: Tensor = NO_ROWS
    held_out: Tensor = NO_ROWS
    known: Tensor = NO_VALUES
    sampled: int = 0
    catalogue_items: int = 0
    catalogue: bool = False
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

    @property
    def shares_histories(self) -> bool:
        """Whether requests share histories; see `history_row`."""
        return self.history_row.numel() > 0

    def with_own_histories(self, padding: Sequence[int] = ()) -> Self:
        """Return the same requests, each with its own history: (B, L, F_h) instead of (H, L, F_h).

        Args:
            padding: The padding id of each column, which follows the views of a history; empty = 0.
        """
        if not self.shares_histories:
            return self
        real = torch.arange(self.history.shape[1], device=self.history.device) < self.history_prefix[:, None]
        ids = torch.tensor(padding or [0], device=self.history.device)
        values = self.history_values
        return self.replace(
            history=torch.where(real[..., None], self.history[self.history_row], ids),
            history_values=torch.where(real[..., None], values[self.history_row], 0.0) if values.numel() else values,
            history_length=self.history_prefix,
            history_row=NO_ROWS,
            history_prefix=NO_ROWS,
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a copy with every tensor moved to a device. Dtypes do not change."""
        return self._each(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory, for asynchronous copies to a GPU."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Tell the CUDA allocator that `stream` uses every tensor, so that their memory is not reused too early."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value.record_stream(stream)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **{**values, **{name: change(value) for name, value in tensors.items()}})
