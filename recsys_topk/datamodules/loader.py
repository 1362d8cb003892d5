"""The data loader: shuffles within shards, distributes batches to processes and workers, resumes at any batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recsys_topk.datamodules.prefetch import copier_for, prefetched
from recsys_topk.datamodules.shard import Shard, ShardBatch
from recsys_topk.types import Array

_EPOCH_STEP: Final = 0x9E3779B97F4A7C1


@dataclass(frozen=True)
class Slice:
    """A global batch (of all processes): positions `start` to `stop` - 1 in the order of a shard."""

    shard: int
    start: int
    stop: int


def global_batches(sizes: Sequence[int], batch_size: int, processes: int) -> list[Slice]:
    """Split shards into global batches of `batch_size` requests per process.

    No batch spans two shards, and no request is dropped or repeated. Every process has the same number of batches, and
    at least one request in each. A last batch with fewer requests than processes is merged into the batch before it.

    Args:
        sizes: Number of requests of each shard.
        batch_size: Requests per batch and process.
        processes: Number of processes.

    Example:
        >>> [(piece.start, piece.stop) for piece in global_batches([10], 4, 1)]
        [(0, 4), (4, 8), (8, 10)]
        >>> [(piece.start, piece.stop) for piece in global_batches([9], 2, 2)]
        [(0, 4), (4, 9)]
    """
    slices = []
    for shard, size in enumerate(sizes):
        if size < processes:
            raise ValueError(
                f"shard number {shard} has {size} requests, too few for {processes} processes; use fewer processes"
            )
        step = batch_size * processes
        edges = [*range(0, size, step), size]
        if len(edges) > 2 and edges[-1] - edges[-2] < processes:
            del edges[-2]
        slices += [Slice(shard, start, stop) for start, stop in itertools.pairwise(edges)]
    return slices


class _Stream(IterableDataset[ShardBatch]):
    """The batches of an epoch from batch `start` on. Worker w of n makes batches w, w + n, ..."""

    def __init__(self, loader: ShardLoader, epoch: int, start: int) -> None:
        self._loader = loader
        self._epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[ShardBatch]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._loader.batches(self._epoch, range(self._start + first, len(self._loader), step))


class ShardLoader:
    """An iterable of batches that Lightning accepts as a data loader.

    Shards are read in the given order. The order within a shard is a random permutation seeded by (seed, epoch,
    `Shard.order_key`). It is the same in every process, and each process takes its share of every global batch. The
    number of workers changes neither the batches nor their order.

    The loader counts the returned batches, so `state_dict` can be used to resume an interrupted epoch.

    Args:
        shards: The shards, in order.
        batch_size: Requests per batch and process.
        seed: Seed of the order and of the negatives.
        shuffle: Whether to shuffle within a shard.
        training: Whether these are training batches. Training negatives differ between epochs.
        rank: Rank of this process.
        processes: Number of processes.
        num_workers: Number of worker processes that make batches; 0 = this process makes them.
        between: The part of each shard to read, as shares of its requests, e.g. (0, 0.9) = all but the newest tenth.
        device: A CUDA device. Each batch is copied to it during the computation on the previous batch; None = no copy.

    Attributes:
        passes: How often an epoch reads the shards, each time in another order.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        batch_size: int,
        *,
        seed: int = 42,
        shuffle: bool = False,
        training: bool = False,
        rank: int = 0,
        processes: int = 1,
        num_workers: int = 0,
        between: tuple[float, float] = (0.0, 1.0),
        device: torch.device | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.shards = tuple(shards)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.training = training
        self.rank = rank
        self.processes = processes
        self.num_workers = num_workers
        self.device = device
        self.passes = 1
        self.ranges = [range(*(round(share * len(shard)) for share in between)) for shard in shards]
        self.slices = global_batches([len(own) for own in self.ranges], batch_size, processes)
        self.epoch = 0
        self._given = 0
        self._resume_at = 0

    @property
    def requests(self) -> int:
        """Number of requests in an epoch, over all processes."""
        return self.passes * sum(len(own) for own in self.ranges)

    @property
    def sampler(self) -> ShardLoader:
        """The object whose `set_epoch` Lightning calls: the loader itself."""
        return self

    @property
    def batch_sampler(self) -> ShardLoader:
        """The loader itself. Lightning reads this attribute if there is a sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. A loaded position of another epoch is discarded."""
        if epoch != self.epoch:
            self.epoch, self._given, self._resume_at = epoch, 0, 0

    def __len__(self) -> int:
        return self.passes * len(self.slices)

    def __iter__(self) -> Iterator[ShardBatch]:
        if self._given == len(self) and not self._resume_at:
            self.epoch += 1
        start, self._resume_at = self._resume_at, 0
        self._given = start
        stream = _Stream(self, self.epoch, start)
        pin = torch.cuda.is_available()
        loader = DataLoader(stream, batch_size=None, num_workers=self.num_workers, pin_memory=pin)
        for batch in prefetched(loader, copier_for(self.device)):
            self._given += 1
            yield batch

    def batches(self, epoch: int, numbers: range) -> Iterator[ShardBatch]:
        """Yield the batches of an epoch with the given indices."""
        order, ordered = np.empty(0, dtype=np.int64), (-1, -1)
        for number in numbers:
            read, place = divmod(number, len(self.slices))
            passed = epoch * self.passes + read
            draw_seed = (self.seed + (passed + 1) * _EPOCH_STEP) % (1 << 62) if self.training else self.seed
            piece = self.slices[place]
            shard = self.shards[piece.shard]
            if (passed, piece.shard) != ordered:
                if ordered[1] not in (-1, piece.shard):
                    self.shards[ordered[1]].release()  # keep only one shard in memory
                order, ordered = self._order(shard, passed, self.ranges[piece.shard]), (passed, piece.shard)
            rows = order[piece.start : piece.stop][self.rank :: self.processes]
            users = None if self.training else shard.users(rows)
            yield ShardBatch.of(
                shard.batch(rows),
                shard=shard.name,
                draw_seed=draw_seed,
                training=self.training,
                excluded=shard.excluded(rows),
                users=() if users is None else tuple(users.tolist()),
                rows=None if self.training else torch.from_numpy(rows),
            )

    def _order(self, shard: Shard, epoch: int, rows: range) -> Array:
        order = np.arange(rows.start, rows.stop)
        return np.random.default_rng([self.seed, epoch, shard.order_key]).permutation(order) if self.shuffle else order

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch: the shard and the number of its requests already returned.

        The shard is None at the end of an epoch. If an epoch reads the shards several times, the number of the pass is
        part of the position.
        """
        over = self._given == len(self)
        read, place = divmod(min(self._given, len(self) - 1), len(self.slices))
        piece = self.slices[place]
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            **({"pass": read} if self.passes > 1 else {}),
            "shard": None if over else self.shards[piece.shard].name,
            "offset": 0 if over else piece.start,
            "global_batch": self.batch_size * self.processes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of `state_dict`. The next iteration starts with the next batch of that epoch."""
        name = state["shard"] if "shard" in state else state["day"]  # version 0.1 wrote "day"
        if state["seed"] != self.seed:
            raise ValueError(
                f"the state was saved with seed {state['seed']}, and this run has seed {self.seed}; resume with "
                f"--data.seed {state['seed']}"
            )
        global_batch = self.batch_size * self.processes
        if state.get("global_batch", global_batch) != global_batch:  # version 0.1 did not write it
            raise ValueError(
                f"the state was saved with a global batch of {state['global_batch']} requests (batch size times number "
                f"of processes), and this run has {self.batch_size} x {self.processes}; resume with "
                f"--data.batch_size {state['global_batch'] // self.processes or 1}, or another number of processes"
            )
        if name is None:
            at = len(self)
        else:
            wanted = (name, state["offset"])
            starts = [(self.shards[piece.shard].name, piece.start) for piece in self.slices]
            if wanted not in starts:
                raise ValueError(
                    f"the state is at request {state['offset']} of {name}, where no batch begins now; "
                    f"resume with the global batch and the data it was saved with"
                )
            at = state.get("pass", 0) * len(self.slices) + starts.index(wanted)
        self.epoch = state["epoch"]
        self._given = at
        self._resume_at = 0 if at == len(self) else at
