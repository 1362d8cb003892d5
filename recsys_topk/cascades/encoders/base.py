"""The interface of a history encoder: it takes ordered views and returns one vector per prefix of the history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from recsys_topk.registry import Registry

registry: Registry[HistoryEncoder]


class HistoryEncoder(nn.Module, ABC):
    """Base class of all encoders. A subclass sets `name`, takes `dim` and `ages` first, and implements `prefixes`.

    Positions are counted from the newest view of a prefix, never as an absolute index:
    ``prefixes(views)[:, r]`` equals ``forward(views[:, :r])``. One pass over a sequence therefore gives the encoding
    at every position.

    Args:
        dim: Width of a view, D.
        ages: Whether the data has the ages of the views (a history feature of kind ``"age"``).

    Attributes:
        ordered: Whether the order of the views matters.
        contextual: Whether a stage with attention attends to `prefixes` (a view with the views before it) instead of
            the views themselves.
        width: Width of the output, W.
    """

    name: ClassVar[str]
    ordered: ClassVar[bool] = True
    contextual: ClassVar[bool] = False

    def __init__(self, dim: int, ages: bool = False) -> None:
        super().__init__()
        self.dim, self.ages, self.width = dim, ages, dim

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)

    @abstractmethod
    def prefixes(self, views: Tensor, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """Return the encoding of every prefix, (B, L + 1, W). Row r is the encoding of the first r views.

        Args:
            views: (B, L, D), oldest first, followed by padding.
            lengths: (B,), the number of views. Rows after it have no meaning.
            ages: (B, L), seconds from each view to the request; None = not known. Only differences are used.
        """

    def forward(self, views: Tensor, lengths: Tensor, ages: Tensor | None = None) -> Tensor:
        """Return the encoding of the whole history, (B, W); the arguments are those of `prefixes`."""
        whole = lengths[:, None, None].expand(-1, 1, self.width)
        return self.prefixes(views, lengths, ages).gather(1, whole).squeeze(1)


registry = Registry("history encoder", "recsys_topk.cascades.encoders", "recsys_topk.encoders", HistoryEncoder)


def make_encoder(history: str | Mapping[str, Any], dim: int, ages: bool) -> HistoryEncoder:
    """Return an encoder.

    Args:
        history: Registry name or class path, or a mapping with it as ``kind`` and the options of the class.
        dim: Width of a view.
        ages: Whether the data has the ages of the views.

    Example:
        >>> make_encoder({"kind": "recency", "heads": 3}, dim=8, ages=False).width
        24
    """
    options = {"kind": history} if isinstance(history, str) else dict(history)
    kind = options.pop("kind", None)
    if not isinstance(kind, str):
        raise ValueError(f"history must be the name of an encoder, or a mapping with its name as kind; got {history!r}")
    cls = registry.resolve(kind)
    try:
        return cls(dim, ages, **options)
    except TypeError as error:
        raise ValueError(f"the history encoder {kind!r} does not accept these options: {error}") from error
