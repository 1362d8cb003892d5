"""Metrics of rankers without a model, on the lists that a run is measured on."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_topk.cascades.module import CascadeModule, Split
from recsys_topk.datamodules import CascadeDataModule, GroundTruth
from recsys_topk.evaluation.popularity import Popularity
from recsys_topk.metrics.mean import ListMean
from recsys_topk.tabular.schema import VARIANT

# Approximate maximum numbers of requests: measured, and counted for popularity.
MEASURED, COUNTED = 10_000, 100_000


@dataclass(frozen=True)
class Baselines:
    """Metrics of rankers without a model.

    Attributes:
        metrics: By ranker (``"random"``, ``"popularity"``, and ``"oracle"`` for simulated data), then by metric.
        requests: Number of requests that were measured.
        right: Mean over lists with a positive of the number of right items, min(k, positives); 0 = not measured.
    """

    metrics: dict[str, dict[str, float]]
    requests: int
    right: float = 0.0


def measure_baselines(
    model: CascadeModule, data: CascadeDataModule, split: Split, batches: int | None = None
) -> Baselines:
    """Measure random order, popularity and, for simulated data, the true utility with the metrics of a model.

    All stages rank by the same score, on the same lists and negatives as the model. Popularity is how often an item was
    a positive in training; it is left out if there are no training shards. At most about 10,000 requests are measured,
    and popularity counts at most about 100,000. With several processes these are requests of the calling process, and
    no process waits for another.

    Args:
        model: The model; only its metrics are used.
        data: The data module, prepared.
        split: ``"val"`` or ``"test"``.
        batches: Maximum number of batches; None = only the limit above.
    """
    popularity = Popularity(data, COUNTED) if data.splits["train"] else None
    truth = GroundTruth.of_data(data)
    names = ["random", *(["popularity"] if popularity else []), *(["oracle"] if truth else [])]
    metrics = {name: _metrics(model, split) for name in names}
    generator = torch.Generator().manual_seed(data.seed)
    loader = data.loader(data.splits[split], training=False)
    limit = -(-MEASURED // loader.batch_size)
    device = "cpu" if data.trainer is None else data.trainer.strategy.root_device
    requests = right = lists = 0
    for shard_batch in itertools.islice(loader, limit if batches is None else min(limit, batches)):
        batch = data.add_negatives(shard_batch.to(device)).to("cpu")
        items = batch.item_id[batch.candidates] % VARIANT
        scores: dict[str, Tensor] = {"random": torch.rand(items.shape, generator=generator)}
        if popularity is not None:
            scores["popularity"] = popularity.local_counts(items).float()
        if truth is not None:
            scores["oracle"] = torch.from_numpy(truth.true_utility(batch.request_id.numpy(), items.numpy()))
        for name, ranker_metrics in metrics.items():
            for metric in ranker_metrics.values():
                inputs: Any = scores[name] if metric.stage is not None else [scores[name]] * len(model.cascade.quotas)
                metric.update(inputs, batch.labels, batch.mask)
        requests += batch.size
        positives = (batch.mask & (batch.labels > model.schema.positive_above)).sum(1).clamp(max=model.k)
        right, lists = right + int(positives.sum()), lists + int((positives > 0).sum())
    # Not `compute`: it sums over all processes, and only the calling process is measured.
    values = {
        ranker: {name: float(m.total / m.count) for name, m in by_name.items()} for ranker, by_name in metrics.items()
    }
    return Baselines(values, requests, right / max(lists, 1))


def _metrics(model: CascadeModule, split: Split) -> dict[str, ListMean]:
    """Return new metrics like those of a model, on the CPU."""
    metrics: dict[str, ListMean] = {}
    for name, metric in dict(model.metrics[split].items()).items():  # type: ignore[operator]
        if metric.higher_is_better is not None:  # selection_mass measures the operator of the loss, not a ranking
            metrics[name] = copy.deepcopy(metric).cpu()
            metrics[name].reset()
    return metrics
