"""A shard is the part of a data source that is in memory at one time, e.g. a day. It makes the batches."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.types import Array

if TYPE_CHECKING:
    from recsys_topk.datamodules.catalogue import Catalogue


@dataclass(frozen=True)
class ShardBatch(CascadeBatch):
    """A batch with its origin, which is needed to add negatives.

    Attributes:
        shard: Name of the shard that contains all requests.
        draw_seed: Seed of the negatives.
        training: Whether it is a training batch.
        pool_rows: (M,) int64, the row of each pool item in the shard's catalogue; None = look it up by item id.
        excluded: (B, E) int64, the result of `Shard.excluded` for the requests.
        rows: (B,) int64, the row numbers of the requests in the shard. Only set in evaluation batches.
    """

    draw_seed: int = 0
    training: bool = False
    pool_rows: Tensor | None = None
    excluded: Tensor | None = None
    rows: Tensor | None = None

    def plain(self) -> CascadeBatch:
        """Return the batch without its origin. An evaluation batch keeps the name of its shard."""
        found = CascadeBatch(**{name: getattr(self, name) for name in _PLAIN})
        return found.replace(shard="") if self.training else found  # a name would cause a recompilation per shard

    @classmethod
    def of(
        cls,
        batch: CascadeBatch,
        *,
        shard: str,
        draw_seed: int,
        training: bool,
        excluded: Tensor | None = None,
        users: tuple[int | str, ...] = (),
        rows: Tensor | None = None,
    ) -> ShardBatch:
        """Return a `ShardBatch` of `batch` with the given origin."""
        origin: dict[str, Any] = {
            "shard": shard,
            "draw_seed": draw_seed,
            "training": training,
            "excluded": excluded,
            "users": users,
            "rows": rows,
        }
        if isinstance(batch, cls):
            return batch.replace(**origin)
        return cls(**{**{name: getattr(batch, name) for name in _PLAIN}, **origin})


_PLAIN = tuple(field.name for field in fields(CascadeBatch))


class Shard(ABC):
    """Requests, accessed by row number, and the catalogue for their negatives.

    Usually there is one shard per day, or one per split if the data have no days. Shards are sent to worker processes,
    so they must be picklable.

    Args:
        name: Name of the shard, unique within its data module.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of requests."""

    @property
    @abstractmethod
    def list_length(self) -> int:
        """The maximum length of a list, N."""

    @abstractmethod
    def batch(self, rows: Array) -> CascadeBatch:
        """Return the requests with row numbers `rows`, (B,), as a batch. It must depend only on `rows`."""

    @abstractmethod
    def catalogue(self, device: torch.device | str = "cpu") -> Catalogue:
        """Return all items of the shard on a device. Negatives are drawn from them."""

    def excluded(self, rows: Array) -> Tensor | None:
        """Return items outside a request's list that must not become its candidates; None = there are none.

        Excluded items are never drawn as negatives, and evaluation over the whole catalogue skips them. In an
        evaluation shard, they are the items of the user before the request, and other items at the time of a positive,
        whose order is not known. In a training shard, they also include later items of the user in the training data,
        because a sampled negative should not be a positive of the same user. An item of the request's own list is
        always a candidate, even if this method returns it.

        Args:
            rows: (B,) row numbers of the requests.

        Returns:
            (B, E) int64, rows of the catalogue in any order; -1 = padding.
        """
        return None

    def earlier(self, rows: Array) -> Tensor | None:
        """Return all items of the user before each request, oldest first; None = they are not known.

        Baselines and metrics over the whole catalogue use them. `history_length` does not limit them.

        Args:
            rows: (B,) row numbers of the requests.

        Returns:
            (B, E) int64, rows of the catalogue, followed by padding, -1.
        """
        return None

    @property
    def requests(self) -> int:
        """Number of requests. A row of the shard may hold several of them."""
        return len(self)

    def sequences(self, held_out: bool = True) -> tuple[Array, Array] | None:
        """Return the interactions of a training shard, ordered by user and time; None = they are not known.

        Args:
            held_out: Whether users that are held out for the later stages of a cascade are included.

        Returns:
            A number for the user and the item id of each interaction, (n,) int64.
        """
        return None

    def times(self, held_out: bool = True) -> Array | None:
        """Return the time of each interaction of `sequences`, (n,) microseconds; None = evaluation is not later.

        Args:
            held_out: See `sequences`.
        """
        return None

    def users(self, rows: Array) -> Array | None:
        """Return the names of the users in the source, (B,) integers or strings; None = they are not known.

        Args:
            rows: (B,) row numbers of the requests.
        """
        return None

    @property
    def order_key(self) -> int:
        """An integer that, with the seed and the epoch, seeds the order of the shard's requests."""
        return zlib.crc32(self.name.encode())

    def release(self) -> None:  # noqa: B027  # most shards have nothing to free
        """Free data that can be read again. Called when the loader goes on to the next shard."""


class TensorShard(Shard):
    """A shard of tensors in memory. Cost of a batch: O(B N log(B N)).

    Args:
        name: Name of the shard.
        catalogue: All items of the shard, on the CPU.
        request_id: (R,) int64, the id of each request.
        lists: (R, N) int64, the candidates of each request as rows of the catalogue; -1 = padding.
        labels: (R, N), finite and >= 0; larger is better.
        group: (R, N) int64, the sample group of each candidate (`Schema.groups`); None = all in group 0.
        request: (R, F_r) int64, ids of the request features; None = there are none.
        history: (R, L, F_h) int64, ids of the user's last views, oldest first, padding ids last; None = no history.
        history_length: (R,) int64, number of views in each history; None = L for all.
        request_values: (R, V_r) floats, numeric features and vectors of the requests.
        history_values: (R, L, V_h) floats, numeric features and vectors of the views; 0 where there is no view.
        excluded: (R, E) int64, excluded catalogue rows of each request (`Shard.excluded`); -1 = padding.

    Example:
        >>> import numpy as np
        >>> from recsys_topk.datamodules import Catalogue
        >>> items = Catalogue(torch.tensor([10, 20, 30]), torch.tensor([[1], [2], [3]]))
        >>> lists = torch.tensor([[0, 1, -1], [1, 0, -1]])
        >>> shard = TensorShard("train", items, torch.tensor([7, 8]), lists, lists.eq(1).float())
        >>> shard.batch(np.array([1])).labels
        tensor([[1., 0., 0.]])
    """

    def __init__(
        self,
        name: str,
        catalogue: Catalogue,
        request_id: Tensor,
        lists: Tensor,
        labels: Tensor,
        group: Tensor | None = None,
        request: Tensor | None = None,
        history: Tensor | None = None,
        history_length: Tensor | None = None,
        request_values: Tensor = NO_VALUES,
        history_values: Tensor = NO_VALUES,
        excluded: Tensor | None = None,
    ) -> None:
        super().__init__(name)
        number = request_id.numel()
        if request is None:
            request = torch.empty((number, 0), dtype=torch.int64)
        if history is None:
            history = torch.empty((number, 0, 0), dtype=torch.int64)
        if history_length is None:
            history_length = torch.full((number,), history.shape[1], dtype=torch.int64)
        self._mask = lists >= 0
        per_request = {
            "request_id": request_id,
            "request": request,
            "history": history,
            "history_length": history_length,
            "labels": torch.where(self._mask, labels, 0).float(),
            "group": torch.where(self._mask, torch.zeros_like(lists) if group is None else group, -1),
        }
        for part, values in (("request_values", request_values), ("history_values", history_values)):
            if values.shape[-1]:
                per_request[part] = values.float()
        if excluded is not None:
            per_request["excluded"] = excluded
        for part, tensor in per_request.items():
            if tensor.shape[0] != number:
                raise ValueError(f"shard {name!r} has {number} request ids and {tensor.shape[0]} rows of {part}")
        items = catalogue.item_id.numel()
        for part, given in (("lists", lists), ("excluded", excluded)):
            if given is not None and given.numel() and not -1 <= int(given.min()) <= int(given.max()) < items:
                raise ValueError(
                    f"{part} of shard {name!r} must hold catalogue rows 0..{items - 1} or -1 for padding, "
                    f"got {int(given.min())}..{int(given.max())}"
                )
        self._excluded = per_request.pop("excluded", None)
        self._lists, self._per_request, self._items = lists, per_request, catalogue

    def __len__(self) -> int:
        return self._lists.shape[0]

    @property
    def list_length(self) -> int:
        """Number of columns of the lists."""
        return self._lists.shape[1]

    def batch(self, rows: Array) -> ShardBatch:
        """Return the given requests. The pool contains the distinct items of their lists, in catalogue order."""
        at = torch.from_numpy(rows)
        lists, mask = self._lists[at], self._mask[at]
        pool = torch.unique(lists[mask])
        if not pool.numel():
            pool = pool.new_zeros(1)  # padding points to row 0
        per_request: dict[str, Any] = {name: tensor[at] for name, tensor in self._per_request.items()}
        return ShardBatch(
            item_id=self._items.item_id[pool],
            items=self._items.features[pool].long(),
            item_values=self._items.values[pool] if self._items.values.shape[1] else NO_VALUES,
            candidates=torch.where(mask, torch.searchsorted(pool, lists), 0),
            mask=mask,
            pool_rows=pool,
            **per_request,
        )

    def excluded(self, rows: Array) -> Tensor | None:
        """Return the excluded items of the given requests."""
        return None if self._excluded is None else self._excluded[torch.from_numpy(rows)]

    def catalogue(self, device: torch.device | str = "cpu") -> Catalogue:
        """Return all items on a device."""
        return self._items.to(device)
