"""The interface of a stage: it takes a batch and returns one score per candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from recsys_topk.cascades.encoders.base import HistoryEncoder, make_encoder
from recsys_topk.cascades.encoders.mean import MeanEncoder
from recsys_topk.cascades.features import Embedded, FeatureEmbedding
from recsys_topk.cascades.layers import MLP, Activation, Initialisation
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.options import inherit_options
from recsys_topk.registry import Registry
from recsys_topk.types import Array

if TYPE_CHECKING:
    from recsys_topk.cascades.towers import Towers

registry: Registry[Stage]
Previous = Literal["ignore", "add", "add_detached"]


class StageOptions(TypedDict, total=False):
    """Options of every stage; see `Stage`. A stage takes them as ``**options: Unpack[StageOptions]``."""

    activation: Activation
    batch_norm: float | None
    initialisation: Initialisation
    dropout: float
    history: str | Mapping[str, Any]


@dataclass
class StageConfig:
    """One stage of a cascade, as written in a config.

    Attributes:
        kind: Registry name or class path of the stage, e.g. ``"two_tower"``, ``"din"``, ``"mlp"``.
        name: Name of the stage in metrics and state-dict keys, e.g. ``"retrieval"``.
        quota: Number of items that it passes on.
        options: Arguments of the stage's class.
        previous: What the stage does with the scores of the stage before it: ``"ignore"``, ``"add"`` (times a learned
            scale, and the stage before it is trained through the sum) or ``"add_detached"`` (it is not).
        hard_negatives: Number of sampled negatives per list that the stage trains on: of those that the stage before it
            trains on, the ones which that stage scores highest. 0 = all.
        random_negatives: Number of sampled negatives that are added to the hard ones regardless of their score.
    """

    kind: str
    name: str
    quota: int
    options: dict[str, Any] = field(default_factory=dict)
    previous: Previous = "ignore"
    hard_negatives: int = 0
    random_negatives: int = 0

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or set(self.name) & set("./\\"):  # it names a folder and keys
            raise ValueError(f"a stage name must be printable text without '.', '/' and '\\', got {self.name!r}")
        if self.quota < 1:
            raise ValueError(f"stage {self.name!r} must pass on at least one item, got quota={self.quota}")
        if self.previous not in get_args(Previous):
            known = ", ".join(get_args(Previous))
            raise ValueError(f"previous of stage {self.name!r} must be one of {known}, got {self.previous!r}")
        if min(self.hard_negatives, self.random_negatives) < 0 or (self.random_negatives and not self.hard_negatives):
            raise ValueError(
                f"stage {self.name!r} cannot train on {self.hard_negatives} hard and {self.random_negatives} random "
                f"negatives; give hard_negatives of at least 1, and random_negatives in addition"
            )

    @classmethod
    def of(cls, config: StageConfig | Mapping[str, Any]) -> StageConfig:
        """Return `config` as a StageConfig."""
        return config if isinstance(config, StageConfig) else cls(**config)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as stored in checkpoints."""
        return asdict(self)


class Stage(nn.Module, ABC):
    """Base class of all stages. A subclass sets `name`, takes `embedding` first, and implements `score`.

    Args:
        embedding: The embedding tables, which may be shared with other stages.
        activation: ``"relu"`` or ``"prelu"``.
        batch_norm: Share of the running averages that is kept at each step, or None for no batch norm.
        initialisation: ``"default"`` (PyTorch's) or ``"he"`` (He et al. 2015).
        dropout: Dropout after each activation.
        history: The encoder of the history: its name (``"mean"``, ``"recency"``, ``"transformer"``), or a mapping with
            the name as ``kind`` and its options, e.g. ``{"kind": "transformer", "blocks": 2}``.

    Attributes:
        encoder: The encoder of the history; None if there is no history.
        history_dim: Width of the encoded history, W.
        shares_histories: Whether `score` takes batches in which requests share histories
            (`CascadeBatch.history_row`). A stage that reads histories only by `embed` can. Other stages get a batch in
            which each request has its own history.
        counts_sequences: Whether the stage implements `count`.
    """

    name: ClassVar[str]
    shares_histories: ClassVar[bool] = False
    counts_sequences: bool = False
    encoder: HistoryEncoder | None

    def __init__(
        self,
        embedding: FeatureEmbedding,
        *,
        activation: Activation = "relu",
        batch_norm: float | None = None,
        initialisation: Initialisation = "default",
        dropout: float = 0.0,
        history: str | Mapping[str, Any] = "mean",
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.perceptron = partial(
            MLP, activation=activation, batch_norm=batch_norm, initialisation=initialisation, dropout=dropout
        )
        dim = embedding.dims["history"]
        if not dim and history != "mean":
            raise ValueError(f"history={history!r} encodes the user's history, but the schema has no history features")
        self.encoder = make_encoder(history, dim, embedding.layout.has_ages) if dim else None
        self.history_dim = self.encoder.width if self.encoder is not None else 0

    @property
    def towers(self) -> Towers | None:
        """The stage itself if its score is the dot product of a request vector and an item vector; else None."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherit_options(cls)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @abstractmethod
    def score(self, batch: CascadeBatch) -> Tensor:
        """Return the scores of all candidates, (B, N). Scores of masked candidates have no meaning."""

    def count(self, user: Array, items: Array) -> None:
        """Learn statistics of the users' training sequences. Called at the start of the training, if it is implemented.

        Args:
            user: (n,) integers, equal for the interactions of one user, which are adjacent.
            items: (n, F_i) ids of the features of each item, as in `CascadeBatch.items`, in the order of time.
        """
        raise NotImplementedError(f"the stage {self.name!r} has no statistics of sequences")

    def count_times(self, user: Array, items: Array, time: Array) -> None:
        """Learn from the times of the training interactions, after `count`, if all evaluation requests are later.

        Args:
            user: See `count`.
            items: See `count`.
            time: (n,) times in microseconds.
        """

    def embed(self, batch: CascadeBatch) -> Embedded:
        """Return the vectors of a batch, with the history as one vector per request, (B, W)."""
        return embed(self.embedding, self.encoder, batch)

    def forward(self, batch: CascadeBatch) -> Tensor:
        """Return `score(batch)`."""
        return self.score(self.readable(batch))

    def readable(self, batch: CascadeBatch) -> CascadeBatch:
        """Return the batch as `score` takes it; see `shares_histories`."""
        return batch if self.shares_histories else batch.with_own_histories(self.embedding.layout.history_padding)


def embed(embedding: FeatureEmbedding, encoder: HistoryEncoder | None, batch: CascadeBatch) -> Embedded:
    """Return the vectors of a batch, with the history as one vector per request, (B, W).

    Args:
        embedding: The embedding tables.
        encoder: The encoder of the history; None = there is no history.
        batch: The batch; its requests may share histories.
    """
    shared = batch.shares_histories and encoder is not None
    if encoder is None or (isinstance(encoder, MeanEncoder) and not shared):
        return embedding(batch, history="mean")  # type: ignore[no-any-return]  # one bag per request is cheaper
    embedded: Embedded = embedding(batch, history="rows")
    if not shared:
        return replace(embedded, history=encoder(embedded.history, batch.history_length, embedded.ages))
    states = encoder.prefixes(embedded.history, batch.history_length, embedded.ages)
    row = batch.history_row * states.shape[1] + batch.history_prefix
    return replace(embedded, history=F.embedding(row, states.flatten(0, 1)))


registry = Registry("stage", "recsys_topk.cascades.stages", "recsys_topk.stages", Stage)
