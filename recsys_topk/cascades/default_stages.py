"""Default stages, chosen by the features of the data."""

from __future__ import annotations

from recsys_topk.cascades.stage import StageConfig
from recsys_topk.tabular.schema import Outline


def default_stages(outline: Outline) -> tuple[StageConfig, ...]:
    """Return the stages for the parts of the data that have features.

    | the data have | stages |
    |---|---|
    | a history | `two_tower` retrieval, quota 30, and `din` ranking, quota 20 |
    | request features, no history | `two_tower` retrieval, quota 30, and `mlp` ranking, quota 20 |
    | item features only | `mlp` ranking, quota 20 (there are no features for a user tower) |

    Args:
        outline: The parts of the data; known before the data are prepared.

    Example:
        >>> [(stage.name, stage.kind, stage.quota) for stage in default_stages(Outline(frozenset({"items"})))]
        [('ranking', 'mlp', 20)]
    """
    ranking = StageConfig("din" if "history" in outline.parts else "mlp", "ranking", 20)
    if not outline.parts & {"request", "history"}:
        return (ranking,)
    return StageConfig("two_tower", "retrieval", 30), ranking
