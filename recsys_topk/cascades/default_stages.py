"""Default stages, chosen by the features of the data and the length of its lists."""

from __future__ import annotations

from recsys_topk.cascades.stage import StageConfig
from recsys_topk.tabular.schema import Outline

SHORT = 40
"""Lists up to this length get smaller quotas, because 30 of 40 items are nearly all."""


def default_k(list_length: int = 0) -> int:
    """Return the number of items wanted: 10, or a fifth of short lists (at least 1).

    Args:
        list_length: The median length of logged lists; 0 = unknown.

    Example:
        >>> default_k(), default_k(7)
        (10, 1)
    """
    return 10 if not 0 < list_length <= SHORT else max(list_length // 5, 1)


def default_stages(outline: Outline, list_length: int = 0, k: int = 0) -> tuple[StageConfig, ...]:
    """Return the stages for the parts of the data that have features.

    | the data have | stages |
    |---|---|
    | a history | `two_tower` retrieval, quota 30, and `din` ranking, quota 20 |
    | request features, no history | `two_tower` retrieval, quota 30, and `mlp` ranking, quota 20 |
    | item features only | `mlp` ranking, quota 20 (there are no features for a user tower) |

    For logged lists of at most 40 items, the quotas are a half and a quarter of the list, at least `k`.

    Args:
        outline: The parts of the data; known before the data are prepared.
        list_length: The median length of logged lists; 0 = unknown.
        k: Number of items wanted at the end of the cascade.

    Example:
        >>> [(stage.name, stage.kind, stage.quota) for stage in default_stages(Outline(frozenset({"items"})))]
        [('ranking', 'mlp', 20)]
        >>> [stage.quota for stage in default_stages(Outline(frozenset({"request", "items"})), list_length=7)]
        [3, 1]
    """
    short = 0 < list_length <= SHORT
    first, last = (max(list_length // 2, k, 1), max(list_length // 4, k, 1)) if short else (30, 20)
    ranking = StageConfig("din" if "history" in outline.parts else "mlp", "ranking", last)
    if not outline.parts & {"request", "history"}:
        return (ranking,)
    return StageConfig("two_tower", "retrieval", first), ranking
