"""Stages with towers: the score is the dot product of a request vector and an item vector."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from recsys_topk.cascades.features import Embedded
from recsys_topk.cascades.stage import Stage
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.stages.pooled_dot import dot


class Towers(Stage):
    """Base class of stages whose score is <request vector, item vector>.

    Item vectors do not depend on the request. The catalogue can therefore be encoded once, searched by matrix products,
    indexed, and exported as two models. A subclass that overrides `score` is treated as a stage without towers.

    Attributes:
        width: Width of the vectors, D.
    """

    width: int

    @abstractmethod
    def encode_requests(self, embedded: Embedded) -> Tensor:
        """Return the vectors of the requests, (B, D). The history is one vector per request."""

    @abstractmethod
    def encode_items(self, embedded: Embedded, real: Tensor | None = None) -> Tensor:
        """Return the vectors of the pool items, (M, D); `real`, boolean (M,), marks the rows that are items."""

    @property
    def towers(self) -> Towers | None:
        """See `Stage.towers`."""
        return self if type(self).score is Towers.score else None

    def encode(self, batch: CascadeBatch) -> tuple[Tensor, Tensor]:
        """Return request vectors (B, D) and pool item vectors (M, D)."""
        embedded = self.embed(batch)
        # Except on a CPU, a pool with sampled negatives may end in rows that are not items, with negative ids.
        real = None if may_read(batch.item_id) else batch.item_id >= 0
        return self.encode_requests(embedded), self.encode_items(embedded, real)

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        users, items = self.encode(batch)
        return dot(users, items, batch.candidates)
