"""Ranker that knows how often a candidate followed the user's newest items, and which items have the same users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.likeness import Likeness
from recsys_topk.cascades.stage import Stage, StageOptions
from recsys_topk.cascades.successors import Successors
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.types import Array

FEATURES = 4
SCALE = 0.2  # logarithms of counts to numbers of about 1, for the MLP
START = 0.5  # first weight of the logarithms of the share and of the likeness


class Transitions(Stage):
    """Score = w . counts + r log(1 + 1000 v_j), or with hidden layers, MLP([request, history, item, counts]) + both.

    The counts of candidate j are log(share of j after the newest items + 1e-4), log(1 + c(newest item, j)) and
    log(share of j after the newest item + 1e-3) (see `Successors`), and log(likeness + 1/10): how many users the
    items of the whole history share with j, 1 on average over the items (see `Likeness`). They come from the training
    sequences, are counted when the training starts, and are stored with the weights. Embedding tables do not represent
    single pairs of items well, so this stage complements a two-tower stage before it (``previous: add_detached``).
    v_j is the share of candidate j in the history, which is 0 unless items may be repeated (``--data.repeats true``),
    and for items that are new. w starts at (1/2, 0, 0, 1/2), r at 1/2, and the MLP at 0: the stage is useful before it
    is trained, and trains on few users.

    Args:
        embedding: The embedding tables. Without hidden layers they are not used; with ``share_embeddings: true`` they
            are those of the other stages, and none are built for this one.
        hidden: Widths of the hidden layers of the MLP; a last layer of width 1 follows. Empty = no MLP. It needs more
            users than the counts; with few users it overfits.
        newest: Number of newest views that are looked up; view number a from the end has weight 1 / a.
        successors: Number of successors that are kept per item. Memory: 8 bytes per item and successor.
        gaps: Largest distance of two items in a sequence.
        damping: Exponent of the popularity by which counts are divided.
        likeness: Number of singular values of the likeness. Memory: 4 bytes per item and value.
        options: Options of every stage; see `Stage`.
    """

    name: ClassVar[str] = "transitions"
    counts_sequences = True

    def __init__(
        self,
        embedding: FeatureEmbedding,
        hidden: Sequence[int] = (),
        newest: int = 5,
        successors: int = 256,
        gaps: int = 5,
        damping: float = 0.3,
        likeness: int = 64,
        **options: Unpack[StageOptions],
    ) -> None:
        super().__init__(embedding, **options)
        shared = embedding.layout.shared_item
        if shared is None:
            raise ValueError(
                f"the stage {self.name!r} counts which item follows which, but the history and the items share no "
                f"categorical feature; use the stage 'din'"
            )
        self.item_column, self.view_column, rows = shared
        self.newest = newest
        self.successors = Successors(rows, successors, gaps, damping)
        self.likeness = Likeness(rows, likeness)
        self.linear = torch.nn.Linear(FEATURES, 1, bias=False)
        dims, self.mlp = embedding.dims, None
        if hidden:
            self.mlp = self.perceptron([dims["request"], self.history_dim, dims["items"], FEATURES], [*hidden, 1])
            torch.nn.init.zeros_(self.mlp.last.weight)
            torch.nn.init.zeros_(self.mlp.last.bias)
        self.repeated = torch.nn.Parameter(torch.tensor(START))
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([START, 0, 0, START]))

    def count(self, user: Array, items: Array) -> None:
        """See `Stage.count`."""
        self.successors.count(user, items[:, self.item_column])
        self.likeness.count(user, items[:, self.item_column])

    def score(self, batch: CascadeBatch) -> Tensor:
        """See `Stage.score`."""
        counts = self.counts(batch)
        linear: Tensor = self.linear(counts).squeeze(-1) + self.repeated * (1e3 * self.shares(batch)).log1p()
        if self.mlp is None:
            return linear
        embedded = self.embed(batch)
        request = self.mlp.project(0, embedded.request) + self.mlp.project(1, embedded.history)
        projected_counts, items = self.mlp.project(3, counts * SCALE), self.mlp.project(2, embedded.items)
        scores: Tensor = self.mlp.joined(projected_counts, request, items, batch.candidates, batch.mask).squeeze(-1)
        return scores + linear

    def shares(self, batch: CascadeBatch) -> Tensor:
        """Return the share of each candidate in the history, (B, N); 0 for new items, which share a row."""
        views = batch.history[:, :, self.view_column]
        real = torch.arange(views.shape[1], device=views.device) < batch.history_length[:, None]
        items = batch.items[:, self.item_column][batch.candidates]
        number = (torch.where(real, views, -1)[:, :, None] == items[:, None]).sum(1)
        return number * (self.likeness.users[items] > 0) / batch.history_length.clamp_min(1)[:, None]

    def counts(self, batch: CascadeBatch) -> Tensor:
        """Return the counts of the candidates, (B, N, 4)."""
        views = F.pad(batch.history[:, :, self.view_column], (0, 1))  # so that a history is never of length 0
        age = torch.arange(self.newest, device=views.device)
        position = batch.history_length[:, None] - 1 - age
        before = views.gather(1, position.clamp_min(0))
        weights = torch.where(position >= 0, 1.0 / (1.0 + age), 0.0)
        after = batch.items[:, self.item_column][batch.candidates]
        successors = self.successors
        share, count = successors.shares(before, after, weights)
        newest_share = count / successors.damps[after] / successors.totals[before[:, :1]].clamp_min(1e-6)
        newest_share, count = (torch.where(position[:, :1] >= 0, x, 0.0) for x in (newest_share, count))
        real = torch.arange(views.shape[1], device=views.device) < batch.history_length[:, None]
        likeness = self.likeness(views, real, after)
        logs = torch.log(share + 1e-4), torch.log1p(count), torch.log(newest_share + 1e-3), torch.log(likeness + 0.1)
        return torch.stack(logs, -1)
