"""Training shard in which every position of a user's sequence is a request, and the requests share histories."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.datamodules.interactions.shard import InteractionsShard
from recsys_topk.datamodules.shard import ShardBatch
from recsys_topk.tabular.ids.keys import mixed
from recsys_topk.types import Array


class PositionShard(InteractionsShard):
    """The requests of an `InteractionsShard`, grouped by sequence. A row is a sequence of up to L views.

    A sequence is a run of a user's requests whose histories are prefixes of the same L views. If a user has more
    views, the next sequence begins L / 2 views later, so that every request beyond the first L sees at least half of
    its views. A batch of H sequences has B requests; `CascadeBatch.history_row` is the sequence of each of them. The
    requests are those of the prepared data: one positive each if they were prepared with ``window=1``.

    Attributes:
        held_out: Share of the users whose requests are `CascadeBatch.held_out`; see `held_out_users`.
    """

    held_out: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "held_out": self.held_out}

    def __len__(self) -> int:
        return len(self._sequences) - 1

    @property
    def requests(self) -> int:
        """See `Shard.requests`."""
        return super().__len__()

    def batch(self, rows: Array) -> ShardBatch:
        """Return the requests of some sequences."""
        requests, row = self._requests_of(np.asarray(rows))
        begin, stop = self._begins[requests], self._requests["stop"][requests]
        last = np.r_[np.flatnonzero(np.diff(row)), len(row) - 1]
        history, values, length = self.views(begin[last], stop[last])
        longest = max(1, int(length.max()))
        return self.with_histories(requests, (history[:, :longest], values[:, :longest], length)).replace(
            history_row=torch.from_numpy(row),
            history_prefix=torch.from_numpy((stop - begin).astype(np.int64)),
            held_out=torch.from_numpy(np.flatnonzero(held_out_users(self._requests["user"][requests], self.held_out))),
        )

    def _training_events(self, held_out: bool) -> tuple[Array, Array]:
        user, at = super()._training_events(held_out)
        kept = held_out | ~held_out_users(user, self.held_out)
        return user[kept], at[kept]

    def excluded(self, rows: Array) -> Tensor | None:
        """Return the items of the user of each sequence, (H, E); see `InteractionsShard.excluded`.

        If items may be repeated, only those that the user had at the same time as another one: all others are
        candidates in evaluation, so later stages must learn to tell them from the positive.
        """
        first = self._sequences[np.asarray(rows)]
        if not self.repeats:
            return super().excluded(first)
        return self._items_between(self._requests["stop"][first], self._requests["tied"][first], self._tied_events)

    def _requests_of(self, rows: Array) -> tuple[Array, Array]:
        """Return the requests of some sequences, one after the other, and the number of the sequence of each."""
        first, number = self._sequences[rows], self._sequences[rows + 1] - self._sequences[rows]
        row = np.repeat(np.arange(rows.size), number)
        requests: Array = first[row] + np.arange(row.size) - (np.cumsum(number) - number)[row]
        return requests, row

    @cached_property
    def _tied_events(self) -> Array:
        """Whether each event is at the time of a request and of another event of the user, with `repeats`."""
        stop, first, number = np.unique(self._requests["stop"], return_index=True, return_counts=True)
        end = stop + number  # with `repeats`, each training event is a request
        end = np.where(end == self._requests["seen"][first], self._requests["tied"][first], end)
        edges = np.zeros(len(self.prepared.events) + 1, np.int8)
        several = end - stop > 1
        edges[stop[several]] += 1
        edges[end[several]] -= 1
        tied: Array = np.cumsum(edges[:-1], dtype=np.int8) > 0
        return tied

    @cached_property
    def _begins(self) -> Array:
        """The first view of the sequence of each request, an event."""
        start, stop = (np.asarray(self._requests[name]) for name in ("start", "stop"))
        step = max(1, self.history_length // 2)
        beyond = np.maximum(stop - start - self.history_length, 0)
        begins: Array = start + step * (-(-beyond // step))
        return begins

    @cached_property
    def _sequences(self) -> Array:
        """The first request of each sequence, and the number of requests at the end."""
        start = np.asarray(self._requests["start"])
        opens = (start[1:] != start[:-1]) | (self._begins[1:] != self._begins[:-1])
        bounds: Array = np.r_[0, np.flatnonzero(opens) + 1, start.size]
        return bounds


def held_out_users(user: Array, share: float) -> Array:
    """Return which users are held out: a pseudo-random choice of about `share` of them, the same in every run.

    Args:
        user: Integers, the rows of the users.
        share: Share of the users, from 0 to 1.

    Example:
        >>> float(held_out_users(np.arange(10_000), 0.1).mean().round(2))
        0.1
    """
    chosen: Array = mixed(np.asarray(user, np.int64), 0) < np.uint64(share * 2.0**64)
    return chosen
