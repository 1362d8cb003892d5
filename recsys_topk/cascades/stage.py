"""The interface of a stage: it takes a batch and returns one score per candidate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from torch import Tensor, nn

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.layers import MLP, Activation, Initialisation
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.registry import Registry

if TYPE_CHECKING:
    from recsys_topk.cascades.towers import Towers

registry: Registry[Stage]


class StageOptions(TypedDict, total=False):
    """Options of every stage; see `Stage`. A stage takes them as ``**options: Unpack[StageOptions]``."""

    activation: Activation
    batch_norm: float | None
    initialisation: Initialisation


@dataclass
class StageConfig:
    """One stage of a cascade, as written in a config.

    Attributes:
        kind: Registry name or class path of the stage, e.g. ``"two_tower"``, ``"din"``, ``"mlp"``.
        name: Name of the stage in metrics and state-dict keys, e.g. ``"retrieval"``.
        quota: Number of items that it passes on.
        options: Arguments of the stage's class.
    """

    kind: str
    name: str
    quota: int
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quota < 1:
            raise ValueError(f"stage {self.name!r} must pass on at least one item, got quota={self.quota}")

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
    """

    name: ClassVar[str]

    def __init__(
        self,
        embedding: FeatureEmbedding,
        *,
        activation: Activation = "relu",
        batch_norm: float | None = None,
        initialisation: Initialisation = "default",
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.perceptron = partial(MLP, activation=activation, batch_norm=batch_norm, initialisation=initialisation)

    @property
    def towers(self) -> Towers | None:
        """The stage itself if its score is the dot product of a request vector and an item vector; else None."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @abstractmethod
    def score(self, batch: CascadeBatch) -> Tensor:
        """Return the scores of all candidates, (B, N). Scores of masked candidates have no meaning."""

    def forward(self, batch: CascadeBatch) -> Tensor:
        """Return `score(batch)`."""
        return self.score(batch)


registry = Registry("stage", "recsys_topk.cascades.stages", "recsys_topk.stages", Stage)
