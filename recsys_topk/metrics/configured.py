"""Create the metrics of a cascade from configuration entries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from recsys_topk.metrics.mean import ListMean, registry
from recsys_topk.registry import suggest

MetricEntry = str | Mapping[str, Any]
DEFAULT: tuple[str, ...] = ("joint_recall", "recall")


def configured_metrics(
    entries: Sequence[MetricEntry],
    *,
    k: int,
    quotas: Mapping[str, int],
    positive_above: float = 0.0,
    labels: Literal["grades", "places"] = "grades",
    operator: Callable[..., Any] | None = None,
) -> dict[str, ListMean]:
    """Return the configured metrics by the name under which they are logged.

    An entry is a registry name (or class path), or a mapping with that name as ``metric`` and options. The options are
    the arguments of the metric's class, and ``stage``, the name of the stage to measure. Without ``stage``, one metric
    per stage is created. A metric of the whole cascade has no ``stage`` option. Options that an entry does not set come
    from the cascade: k, m (the quota of the stage), quotas, positive_above, and a linear gain if labels are places.

    Args:
        entries: The configuration entries.
        k: Number of items wanted at the end of the cascade.
        quotas: Number of items that each stage passes on, by stage name, first stage first.
        positive_above: Items with a label above this are positive.
        labels: Kind of labels, as in a schema.
        operator: The top-k operator of the loss. None = the loss has no operator; metrics of an operator then raise.

    Example:
        >>> metrics = configured_metrics(["joint_recall", "recall"], k=10, quotas={"retrieval": 30, "ranking": 20})
        >>> list(metrics)
        ['joint_recall@10@20', 'retrieval_recall@10@30', 'ranking_recall@10@20']
        >>> list(configured_metrics([{"metric": "ndcg", "k": 5, "stage": "ranking"}], k=10, quotas={"ranking": 20}))
        ['ranking_ndcg@5']
    """
    offered = {"k": k, "quotas": tuple(quotas.values()), "positive_above": positive_above, "operator": operator}
    if labels == "places":
        offered["gain"] = "linear"
    found: dict[str, ListMean] = {}
    for entry in entries:
        for name, metric in _of_entry(entry, quotas, offered).items():
            if name in found:
                raise ValueError(f"two metrics would be logged as {name!r}; give one of them another k, m or stage")
            found[name] = metric
    return found


def _of_entry(entry: MetricEntry, quotas: Mapping[str, int], offered: Mapping[str, Any]) -> dict[str, ListMean]:
    options = {"metric": entry} if isinstance(entry, str) else dict(entry)
    name, stage = options.pop("metric", None), options.pop("stage", None)
    if not isinstance(name, str):
        raise ValueError(f"a metric must be a name or a mapping such as {{metric: ndcg, k: 5}}, got {entry!r}")
    cls = registry.resolve(name)
    accepted = inspect.signature(cls).parameters
    takes = [option for option in accepted if option != "operator"]
    unknown = next((option for option in options if option not in takes), None)
    if unknown is not None:
        known = [*takes, *([] if cls.whole_cascade else ["stage"])]
        raise ValueError(
            f"metric {name!r} has no option {unknown!r}; {suggest(unknown, known)}its options: {', '.join(known)}"
        )
    if stage is not None and (cls.whole_cascade or stage not in quotas):
        raise ValueError(
            f"metric {name!r} measures the whole cascade and has no option 'stage'; remove it"
            if cls.whole_cascade
            else f"metric {name!r}: unknown stage {stage!r}; the stages are {', '.join(quotas)}"
        )
    if "operator" in accepted and offered["operator"] is None:
        raise ValueError(
            f"metric {name!r} measures the top-k operator of the loss, but this loss has none; remove the metric"
        )
    if cls.whole_cascade:
        made = cls(**_complete(options, offered, accepted))
        return {made.label: made}
    found = {}
    for number, (own, quota) in enumerate(quotas.items()):
        if stage in (None, own):
            made = cls(**_complete(options, {**offered, "m": quota}, accepted))
            made.stage = number
            found[f"{own}_{made.label}"] = made
    return found


def _complete(options: Mapping[str, Any], offered: Mapping[str, Any], accepted: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in offered.items() if name in accepted}, **options}
