"""Default stages, chosen by the features of the data."""

from __future__ import annotations

from recsys_topk.cascades.stage import StageConfig
from recsys_topk.tabular.schema import Schema


def default_stages(schema: Schema) -> tuple[StageConfig, ...]:
    """Return the stages for the features of a schema.

    | the schema has | stages |
    |---|---|
    | a history | `two_tower` retrieval, quota 30, and `din` ranking, quota 20 |
    | request features, no history | `two_tower` retrieval, quota 30, and `mlp` ranking, quota 20 |
    | item features only | `mlp` ranking, quota 20 (there are no features for a user tower) |

    Args:
        schema: The features.

    Example:
        >>> from recsys_topk.tabular.schema import Feature
        >>> schema = Schema(tables=(), request=(), history=(), items=(Feature("bm25", kind="numeric"),))
        >>> [(stage.name, stage.kind, stage.quota) for stage in default_stages(schema)]
        [('ranking', 'mlp', 20)]
    """
    ranking = StageConfig("din" if schema.history else "mlp", "ranking", 20)
    if not schema.request and not schema.history:
        return (ranking,)
    return StageConfig("two_tower", "retrieval", 30), ranking
