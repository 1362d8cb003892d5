"""Evaluation over the whole catalogue, after the sampled one: as a function, and as a Lightning callback."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from recsys_topk.cascades.module import CascadeModule, Split
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.evaluation.baselines import Baseline
from recsys_topk.evaluation.corpus import CorpusEvaluation
from recsys_topk.evaluation.popularity import Popularity
from recsys_topk.evaluation.search import Search
from recsys_topk.evaluation.training_log import TrainingLog
from recsys_topk.files import write_whole

LogLine = Callable[[str], None]

# Pairs of request and item that a stage without towers scores at once.
PAIRS_AT_ONCE = 1 << 17
SECONDS_BETWEEN_LINES = 10.0

log = logging.getLogger(__name__)


def evaluate_corpus(
    model: CascadeModule,
    data: CascadeDataModule,
    split: Split = "test",
    *,
    batches: int | None = None,
    log_line: LogLine = log.info,
    **options: Any,
) -> CorpusEvaluation:
    """Measure a cascade over all items of the catalogues of a split; see `CorpusEvaluation`.

    Args:
        model: The model. It is measured with its current weights, on its device, in evaluation mode.
        data: The data module, prepared.
        split: ``"val"`` or ``"test"``.
        batches: Number of batches to measure; None = all.
        log_line: Takes a line about the progress every few seconds.
        options: Further arguments of `CorpusEvaluation`, e.g. ``cuts=[20]``.

    Returns:
        The evaluation; `compute` gives the metrics by name.

    Example::

        evaluation = evaluate_corpus(model, data, cuts=[20], alone=["ranking"])
        evaluation.compute()["recall@20/corpus"]
    """
    batch_size = data.loader(data.splits[split], training=False).batch_size
    options.setdefault("items_at_once", max(1, PAIRS_AT_ONCE // batch_size))
    evaluation = CorpusEvaluation(model.cascade, model.schema, k=model.k, **options)
    was_training = model.training
    model.eval()
    try:
        _measure(evaluation, data, split, model.device, batches, log_line)
    finally:
        model.train(was_training)
    return evaluation


def evaluate_baseline(
    baseline: str | Baseline,
    data: CascadeDataModule,
    split: Split = "val",
    *,
    k: int = 10,
    cuts: Sequence[int] = (20,),
    batches: int | None = None,
    log_line: LogLine = log.info,
    **options: Any,
) -> dict[str, float]:
    """Measure a baseline over all items, with the requests and exclusions of `evaluate_corpus`.

    To tune a baseline, compare its options on ``"val"``, then measure the best ones on ``"test"``.

    Args:
        baseline: A name (popularity, transitions, itemknn, als, ...), or an object with its own options.
        data: The data module, prepared.
        split: ``"val"`` or ``"test"``.
        k: Size of the true set of the joint recall.
        cuts: K of recall and NDCG.
        batches: Number of batches to measure; None = all.
        log_line: Takes a line about the progress every few seconds.
        options: Further arguments of `CorpusEvaluation`, e.g. ``slices=["short", "long"]``.

    Returns:
        The metrics by name.

    Example::

        recalls = {n: evaluate_baseline(ALS(factors=n), data)["recall@20"] for n in (16, 32, 64)}
        evaluate_baseline(ALS(factors=max(recalls, key=recalls.get)), data, "test")
    """
    evaluation = CorpusEvaluation(None, data.schema, k=k, cuts=cuts, baselines=[baseline], **options)
    _measure(evaluation, data, split, torch.device("cpu"), batches, log_line)
    metrics = {tuple(name.split("/")): value for name, value in evaluation.compute().items()}
    return {metric: value for (metric, column), value in metrics.items() if column != "random"}


def corpus_options(metric: str) -> dict[str, Any]:
    """Return the options of an evaluation over the catalogue that measures a metric, e.g. ``recall@20/corpus``."""
    cut = metric.partition("/")[0].partition("@")[2]
    return {"baselines": False, **({"cuts": [int(cut)]} if cut.isdigit() else {})}


def _measure(
    evaluation: CorpusEvaluation,
    data: CascadeDataModule,
    split: Split,
    device: torch.device,
    batches: int | None,
    log_line: LogLine,
) -> None:
    """Update an evaluation with the batches of a split."""
    popularity = Popularity(data) if data.splits["train"] else None
    loader = data.loader(data.splits[split], training=False)
    opened, shown = None, time.monotonic()
    total = len(loader) if batches is None else min(batches, len(loader))
    with torch.no_grad():
        for number, batch in enumerate(itertools.islice(loader, total)):
            if batch.shard != opened:
                items, opened = data.catalogue(batch.shard, device), batch.shard
                counts = None if popularity is None else popularity.counts(items.item_id)
                evaluation.open(items, None if counts is None else TrainingLog.of(data, items, counts))
                log_line(f"scoring all {len(items):,} items of {opened}")
            assert batch.rows is not None
            earlier = data.shard(batch.shard).earlier(batch.rows.cpu().numpy())
            batch = batch.to(device)
            evaluation.update(batch.plain(), batch.excluded, None if earlier is None else earlier.to(device))
            if time.monotonic() - shown > SECONDS_BETWEEN_LINES:
                log_line(f"whole catalogue: {number + 1} of {total} batches")
                shown = time.monotonic()


class CorpusMetrics(Callback):  # type: ignore[misc]  # lightning is untyped here
    """Measures the cascade over the whole catalogue at the end of each validation and test, and logs the metrics.

    Names are those of `CorpusEvaluation` after the split, e.g. ``test/joint_recall@10@20/corpus``. Training is not
    affected. With your own trainer::

        Trainer(callbacks=[CorpusMetrics(cuts=[20])]).test(model, data)

    Args:
        cuts: K of the final list's recall and NDCG; None = k and the last quota.
        alone: Later stages that are measured over all items too.
        baselines: Names of baselines, or objects; True = popularity and random order.
        searches: Further ways to make the candidates of the first stage, each measured under its name in place of
            ``corpus``: functions of (stage, items), see `CorpusEvaluation`.
        log_line: Takes a line about the progress every few seconds.
        file: Where to write the metrics and the counts as JSON; None = nowhere.
        options: Further arguments of `CorpusEvaluation`, e.g. ``slices=["new", "warm"]``.
    """

    def __init__(
        self,
        cuts: Sequence[int] | None = None,
        alone: Sequence[str] = (),
        *,
        baselines: bool | Sequence[str | Baseline] = True,
        searches: Mapping[str, Callable[..., Search]] | None = None,
        log_line: LogLine = log.info,
        file: Path | None = None,
        **options: Any,
    ) -> None:
        self.searches = dict(searches or {})
        self.options: dict[str, Any] = {"cuts": cuts, "alone": alone, "baselines": baselines, **options}
        self.log_line, self.file = log_line, file

    def setup(self, trainer: pl.Trainer, pl_module: CascadeModule, stage: str) -> None:
        """Raise on options that do not fit the cascade, before anything is measured."""
        CorpusEvaluation(pl_module.cascade, pl_module.schema, k=pl_module.k, **self.options)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: CascadeModule) -> None:
        """Measure on the validation shards."""
        if not trainer.sanity_checking:
            self._measure(trainer, pl_module, "val", trainer.num_val_batches)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: CascadeModule) -> None:
        """Measure on the test shards."""
        self._measure(trainer, pl_module, "test", trainer.num_test_batches)

    def _measure(self, trainer: pl.Trainer, model: CascadeModule, split: Split, batches: Sequence[float]) -> None:
        data: Any = trainer.datamodule
        if not isinstance(data, CascadeDataModule):
            raise ValueError(
                "evaluation over the whole catalogue needs a CascadeDataModule; give the trainer datamodule="
            )
        with trainer.precision_plugin.forward_context():
            options: dict[str, Any] = {"batches": int(batches[0]), "log_line": self.log_line, **self.options}
            evaluation = evaluate_corpus(model, data, split, **options)
            metrics = evaluation.compute()
            for column, search in self.searches.items():
                search_options = {**options, "baselines": False, "alone": (), "search": search, "column": column}
                metrics |= evaluate_corpus(model, data, split, **search_options).compute()
        for name, value in metrics.items():
            model.log(f"{split}/{name}", value, on_epoch=True, sync_dist=trainer.world_size > 1)
        counts = evaluation.counts()
        skipped = counts["requests_without_positives"]
        self.log_line(f"whole catalogue: {counts['requests']:,} requests, {skipped:,} without a positive skipped")
        if self.file is not None and trainer.is_global_zero:
            json_metrics = {name: None if math.isnan(value) else value for name, value in metrics.items()}
            write_whole(self.file, json.dumps({"split": split, **counts, "metrics": json_metrics}, indent=2) + "\n")
