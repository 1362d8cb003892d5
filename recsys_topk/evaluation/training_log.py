"""The training data as baselines and metrics of the whole catalogue use them: interactions as rows of a catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recsys_topk.types import Array

if TYPE_CHECKING:
    from recsys_topk.datamodules.base import CascadeDataModule
    from recsys_topk.datamodules.catalogue import Catalogue


@dataclass(frozen=True)
class TrainingLog:
    """The training interactions of a data module.

    Attributes:
        counts: (C,) int64, how often each item of the catalogue is a positive in the training data.
        sequences: The user, numbered from 0, and the catalogue row of each interaction, ordered by user and time; None
            = the data module does not know them (`Shard.sequences`).
    """

    counts: Tensor
    sequences: tuple[Array, Array] | None = None

    @classmethod
    def of(cls, data: CascadeDataModule, items: Catalogue, counts: Tensor) -> TrainingLog:
        """Return the interactions of the training shards with items of a catalogue.

        Args:
            data: The data module, prepared.
            items: The catalogue.
            counts: How often each of its items is a positive in the training data.
        """
        shards = data.splits["train"]
        # The numbers of users of several shards cannot be compared.
        sequences = data.shard(shards[0]).sequences() if len(shards) == 1 else None
        if sequences is None:
            return cls(counts)
        user, item_id = np.unique(sequences[0], return_inverse=True)[1], sequences[1]
        ids = items.item_id.cpu().numpy()
        row = np.searchsorted(ids, item_id).clip(max=len(ids) - 1)
        known = ids[row] == item_id
        return cls(counts, (user[known], row[known]))

    @property
    def items(self) -> int:
        """Number of items in the catalogue, C."""
        return self.counts.numel()

    @cached_property
    def users(self) -> int:
        """Number of users with an interaction."""
        return np.unique(self.sequences[0]).size if self.sequences is not None else 0

    @cached_property
    def user_counts(self) -> Tensor:
        """(C,) int64, the number of users who had each item."""
        assert self.sequences is not None
        user, row = self.sequences
        pairs = np.unique(user.astype(np.int64) * self.items + row)
        return torch.from_numpy(np.bincount(pairs % self.items, minlength=self.items)).to(self.counts.device)

    def interactions(self, baseline: str) -> tuple[Array, Array]:
        """Return `sequences`, or raise an error that names the baseline that needs them."""
        if self.sequences is None:
            raise ValueError(
                f"the baseline {baseline!r} needs the users' training interactions, and these data have lists only; "
                f"use --baselines popularity, or --data interactions"
            )
        return self.sequences
