"""The LightningModule: a cascade, an objective, metrics and an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.catalogue_training import catalogue_terms, check_catalogue_options
from recsys_topk.cascades.count_sequences import count_sequences
from recsys_topk.cascades.default_stages import default_k, default_stages
from recsys_topk.cascades.inference import apply_quotas
from recsys_topk.cascades.learning_check import LearningCheck, all_selected_message
from recsys_topk.cascades.memory import check_weights
from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput, default_objective
from recsys_topk.cascades.objectives.base import registry as objectives
from recsys_topk.cascades.optimizers import DenseAndFused, fused_optimizer, make_optimizer, table_collections, warm_up
from recsys_topk.cascades.sampled_negatives import (
    check_logq_correction,
    check_negatives,
    check_pool,
    keep_hard_negatives,
    pool_weights,
)
from recsys_topk.cascades.schedules import describe_schedule, make_schedule
from recsys_topk.cascades.shards import load_into, stored_weights
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.cascades.tables import is_fused
from recsys_topk.cascades.upgrade import upgrade
from recsys_topk.checks import DeferredChecks
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.base import registry as losses
from recsys_topk.metrics.configured import DEFAULT, MetricEntry, configured_metrics
from recsys_topk.metrics.mean import ListMean
from recsys_topk.processes import average, global_batch
from recsys_topk.registry import suggest
from recsys_topk.spec import build, describe
from recsys_topk.tabular.schema import Schema
from recsys_topk.trust import inspect_names, loading, reading

Split = Literal["val", "test"]
ObjectiveFactory = Callable[[RankingLoss, int], CascadeObjective]


class CascadeModule(pl.LightningModule):  # type: ignore[misc]  # lightning is untyped here
    """Trains a cascade with one objective and measures which items survive.

    A checkpoint stores plain descriptions (class paths and arguments) of the parts. Checkpoints therefore load with
    ``weights_only=True``, and `load_from_checkpoint` rebuilds the loss and the objective.

    Args:
        schema: The features, as a `Schema` or its `to_dict`. A dictionary is treated as the content of a file: class
            paths in the other arguments must then be allowed by `recsys_topk.trust`.
        stages: The stages, first stage first; None = chosen by the features (`default_stages`).
        loss: A loss, its registry name, or a description (`recsys_topk.spec.describe`). Label options that it does not
            set (positive_above, gains) come from the schema.
        objective: A registry name, a description, or a callable of (loss, number of stages); None = as
            `default_objective` says: ``"joint"`` for a loss with an operator, else ``"independent"``.
        k: Number of items wanted at the end of the cascade; None = 10, or a fifth of short logged lists (`default_k`).
        dim: Embedding dimension, one for all tables or by table name; ``"auto"`` = by the number of rows, at most 64.
        share_embeddings: All stages use one set of tables.
        init_std: Tables are initialised from N(0, init_std^2).
        tie_history: The history reads the tables of the items. False = it has separate tables.
        optimizer: Name of the optimizer.
        lr: Learning rate.
        embedding_optimizer: ``"same"``, or an optimizer that updates the tables inside backward: ``"rowwise_adagrad"``
            (recommended for large tables), ``"adagrad"`` or ``"sgd"``.
        embedding_lr: Learning rate of tables that are updated inside backward; None = `lr`.
        optimizer_options: Further arguments of the optimizer, e.g. ``{"eps": 1e-12}``.
        warmup_steps: Number of steps in which the learning rate rises to `lr`.
        lr_scheduler: A schedule of `torch.optim.lr_scheduler`: its name, or a mapping with `class_path` and `init_args`
            (`recsys_topk.cascades.schedules`); None = a constant learning rate after the warm-up.
        validate: Raise on NaN or infinity among the scores. On devices other than the CPU the error comes one step
            later.
        hard_negatives: Number of sampled negatives per list to train all stages on, those with the highest scores of
            the first stage at that step. The selection has no gradient. `random_negatives` are added; 0 = train on all.
            `StageConfig.hard_negatives` selects for one stage.
        random_negatives: Number of sampled negatives per list that are kept regardless of their score.
        metrics: Metrics to compute: names, or mappings such as ``{"metric": "ndcg", "k": 5}`` (`configured_metrics`);
            None = the joint recall and the recall of each stage.
        monitor: Logged name, without the split, of the metric that selects the best checkpoint, e.g.
            ``"joint_recall@10@20"``, or over the whole catalogue ``"recall@20/corpus"`` (`CorpusMetrics`, which `fit`
            adds); None = the joint recall, or the first metric if that is not computed.
    """

    def __init__(
        self,
        schema: Schema | Mapping[str, Any],
        stages: Sequence[StageConfig | Mapping[str, Any]] | None = None,
        loss: RankingLoss | Mapping[str, Any] | str = "dftopk",
        objective: ObjectiveFactory | Mapping[str, Any] | str | None = None,
        k: int | None = None,
        dim: int | Mapping[str, int] | Literal["auto"] = 8,
        share_embeddings: bool = False,
        optimizer: str = "adam",
        lr: float = 1e-2,
        embedding_optimizer: str = "same",
        embedding_lr: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        warmup_steps: int = 0,
        lr_scheduler: Mapping[str, Any] | str | None = None,
        validate: bool = True,
        metrics: Sequence[MetricEntry] | None = None,
        monitor: str | None = None,
        hard_negatives: int = 0,
        random_negatives: int = 0,
        init_std: float = 1.0,
        tie_history: bool = True,
    ) -> None:
        super().__init__()
        described = isinstance(schema, Mapping)  # from a checkpoint, so all class paths are treated as file content
        if described:
            descriptions = {"stages": stages, "loss": loss, "objective": objective, "metrics": metrics}
            inspect_names(descriptions, "the description of a cascade")
        if isinstance(schema, Mapping) and "version" not in schema:
            loss, objective = _upgrade_descriptions(loss, objective)
        self.schema = schema if isinstance(schema, Schema) else Schema.from_dict(dict(schema))
        counts = {"warmup_steps": warmup_steps, "hard_negatives": hard_negatives, "random_negatives": random_negatives}
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self.k = k = default_k(self.schema.list_length) if k is None else k
        if k < 1:
            raise ValueError(f"k, the number of items wanted at the end of the cascade, must be at least 1, got {k}")
        fused = fused_optimizer(embedding_optimizer, lr if embedding_lr is None else embedding_lr)
        metric_entries = DEFAULT if metrics is None else metrics
        with reading() if described else nullcontext():
            chosen = default_stages(self.schema.outline, self.schema.list_length, k) if stages is None else stages
            configs = [StageConfig.of(stage) for stage in chosen]
            options: dict[str, Any] = {"dim": dim, "share_embeddings": share_embeddings, "tie_history": tie_history}
            check_weights(self.schema, configs, **options)
            self.cascade = Cascade(self.schema, chosen, dim, share_embeddings, fused, init_std, tie_history)
            built = _loss(loss, self.schema)
            self.objective = _objective(objective, built, len(self.cascade.configs))
            self.metrics = nn.ModuleDict({split: self._metrics(metric_entries) for split in ("val", "test")})
        if isinstance(built.k, int) and built.k < 1:
            raise ValueError(f"the k of the loss must be at least 1, got {built.k}; set --loss.k")
        self.objective.validate = validate
        self.objective.deferred_checks = self._deferred_checks = DeferredChecks()
        self.save_hyperparameters(
            {
                "schema": self.schema.to_dict(),
                "stages": [config.to_dict() for config in self.cascade.configs],
                "loss": describe(built),
                "objective": describe(self.objective, exclude=("loss", "stages")),
                "k": k,
                "dim": dim if isinstance(dim, (int, str)) else dict(dim),
                "share_embeddings": share_embeddings,
                "init_std": init_std,
                "tie_history": tie_history,
                "optimizer": optimizer,
                "lr": lr,
                "embedding_optimizer": embedding_optimizer,
                "embedding_lr": embedding_lr,
                "optimizer_options": dict(optimizer_options or {}),
                **counts,
                "lr_scheduler": None if lr_scheduler is None else describe_schedule(lr_scheduler),
                "validate": validate,
                "metrics": None if metrics is None else [e if isinstance(e, str) else dict(e) for e in metrics],
                "monitor": monitor,
            },
            logger=False,
        )
        self.monitor = self._monitored(monitor)
        self._check: LearningCheck | None = None
        self._first_epoch = 0

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, trust: Iterable[str] = (), **kwargs: Any
    ) -> CascadeModule:
        """Load a model like Lightning's method. Class paths in the file are checked before they are imported.

        Args:
            checkpoint_path: The file.
            args: Arguments of Lightning's method.
            trust: Packages whose classes the checkpoint may name, e.g. ``["my_package"]``; see `recsys_topk.trust`.
            kwargs: Keyword arguments of Lightning's method; `weights_only` defaults to True.
        """
        with loading(checkpoint_path, kwargs, trust), warnings.catch_warnings():
            stored = stored_weights(checkpoint_path)
            if stored is not None:
                kwargs["strict"] = False
                warnings.filterwarnings("ignore", "Found keys that are in the model state dict but not")
            model: CascadeModule = super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        if stored is not None:
            load_into(model, stored)
        return model

    @property
    def loss(self) -> RankingLoss:
        """The loss of the objective."""
        return self.objective.loss

    def forward(self, batch: CascadeBatch) -> list[Tensor]:
        """Return the scores of each stage, each (B, N)."""
        scores: list[Tensor] = self.cascade(batch)
        return scores

    def compute_objective(self, batch: CascadeBatch) -> ObjectiveOutput:
        """Return the objective of a batch, with its terms."""
        if batch.catalogue:
            terms = catalogue_terms(self.cascade, self.loss, batch)
            return ObjectiveOutput.of_stages(torch.stack(terms).sum(), terms)
        if self.hparams["hard_negatives"]:
            first = next(iter(self.cascade.stages.values()))
            batch = keep_hard_negatives(batch, first, self.hparams["hard_negatives"], self.hparams["random_negatives"])
        scores, lists = self.cascade.training_lists(batch)
        arguments: dict[str, Any] = {"quotas": self.cascade.quotas, "k": self.k}
        if self.objective.pool is not None:
            # Lists of single stages have no sampling probabilities, so they raise here.
            arguments["item_weights"] = pool_weights(lists[-1], self.objective.pool)
        elif batch.log_q.numel():  # not for stages with negatives that were selected by score
            check_logq_correction(self.objective)
            scores = [
                self.loss.correct_sampling(x, part.log_q) if part.log_q.numel() else x
                for x, part in zip(scores, lists, strict=True)
            ]
        if lists[-1] is batch:
            output: ObjectiveOutput = self.objective(scores, batch.labels, batch.mask, groups=batch.group, **arguments)
        else:
            output = self.objective(scores, [part.labels for part in lists], [part.mask for part in lists], **arguments)
        return output

    def training_step(self, batch: CascadeBatch, batch_idx: int) -> Tensor:
        """Return the objective of a batch, and log it with its terms.

        With several processes, means are over the lists of all processes (`recsys_topk.processes`).
        """
        self._deferred_checks.raise_failed()
        if self._check is not None and self._check.add(batch):
            self._finish_check()
        with global_batch(self.trainer.world_size > 1):
            output = self.compute_objective(batch)
            values = average(torch.stack([output.total, *output.terms.values()]))
        self.newest_terms = values[1:].detach()
        self.log("train/loss", values[0], prog_bar=True, batch_size=batch.size)
        for name, term in zip(output.terms, values[1:], strict=True):
            suffix = self.cascade.names[output.stage_of[name]] if name in output.stage_of else name
            self.log(f"train/loss_{suffix}", term, batch_size=batch.size)
        return output.total

    def validation_step(self, batch: CascadeBatch, batch_idx: int) -> None:
        """Update and log the metrics of the validation day."""
        self._evaluate("val", batch)

    def test_step(self, batch: CascadeBatch, batch_idx: int) -> None:
        """Update and log the metrics of the test day."""
        self._evaluate("test", batch)

    def predict_step(self, batch: CascadeBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return columns with one row per real candidate, list by list.

        The columns are request id, item id, group, label, the score of each stage, kept, rank (0 = not kept), and the
        number of stages that passed the item on.
        """
        scores = self(batch)
        result = apply_quotas(scores, batch.mask, self.cascade.quotas)
        columns = {
            "request_id": batch.request_id[:, None].expand_as(batch.candidates),
            "item_id": batch.item_id[batch.candidates],
            "group": batch.group,
            "label": batch.labels,
            **{f"score_{name}": x for name, x in zip(self.cascade.names, scores, strict=True)},
            "kept": result.kept,
            "rank": result.rank,
            "passed": result.passed.sum(0),
        }
        return {name: column[batch.mask].cpu() for name, column in columns.items()}

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its warm-up and schedule if they are configured."""
        options = self.hparams
        optimizer = make_optimizer(options["optimizer"], self, options["lr"], options["optimizer_options"])
        if options["lr_scheduler"] is not None:
            arguments: dict[str, Any] = {"warmup_steps": options["warmup_steps"], "monitor": f"val/{self.monitor}"}
            described = make_schedule(optimizer, options["lr_scheduler"], length=self._training_length, **arguments)
            return {"optimizer": optimizer, "lr_scheduler": described}
        if not options["warmup_steps"]:
            return optimizer
        schedule = warm_up(optimizer, options["warmup_steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _training_length(self, interval: str) -> int:
        """Return the number of optimizer steps or epochs of the training."""
        length = self.trainer.max_epochs if interval == "epoch" else self.trainer.estimated_stepping_batches
        if length is None or not 0 < length < float("inf"):
            raise ValueError(
                "the length of the schedule defaults to the length of the training, which is not limited; set "
                "--trainer.max_epochs, or the length (--lr_scheduler.T_max, total_steps or total_iters)"
            )
        return int(length)

    def setup(self, stage: str) -> None:
        """Raise if the data has a different vocabulary (mapping from ids to table rows) than the model."""
        schema = getattr(self.trainer.datamodule, "schema", None)
        if not isinstance(schema, Schema):
            return
        vocabularies = {table.name: table.vocabulary for table in self.schema.tables}
        for table in schema.tables:
            if vocabularies.get(table.name, table.vocabulary) != table.vocabulary:
                raise ValueError(
                    f"the vocabulary of table {table.name} in the data differs from that of the model; "
                    f"use the training days and the vocabulary options that the model was trained with"
                )

    def on_fit_start(self) -> None:
        """Raise on combinations of options that would have no effect or a wrong one."""
        self._first_epoch = self.trainer.current_epoch
        self._check_lists()
        options = self.hparams
        if self.objective.pool is not None:
            hard = options["hard_negatives"] or any(config.hard_negatives for config in self.cascade.configs)
            cuts = self.objective.cuts(self.cascade.quotas, self.k)
            check_pool(self.trainer.datamodule, self.objective, bool(hard), cuts)
        check_negatives(self.trainer.datamodule, self.objective, options["hard_negatives"], options["random_negatives"])
        check_catalogue_options(self.trainer.datamodule, self.cascade, self.objective.name, self.trainer.world_size)
        if self.hparams["embedding_optimizer"] == "same":
            return
        tables = f"embedding_optimizer={self.hparams['embedding_optimizer']!r} updates the tables inside backward"
        if self.trainer.world_size > 1 and any(map(is_fused, table_collections(self).values())):
            raise ValueError(
                f"{tables}, with the gradients of one process only, so the tables of the {self.trainer.world_size} "
                f"processes would diverge; use --trainer.strategy torchrec, or --model.embedding_optimizer same"
            )
        if self.trainer.accumulate_grad_batches > 1:
            raise ValueError(
                f"{tables}, so they would be updated at each of the {self.trainer.accumulate_grad_batches} accumulated "
                f"batches; use --model.embedding_optimizer same, or a larger --data.batch_size"
            )
        if self.trainer.gradient_clip_val:
            raise ValueError(
                f"{tables}, so gradient clipping would not apply to them; "
                f"use --model.embedding_optimizer same, or remove --trainer.gradient_clip_val"
            )
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                f"{tables}, with gradients that 16-mixed precision has scaled up; "
                f"use --trainer.precision bf16-mixed, or --model.embedding_optimizer same"
            )

    def on_train_epoch_start(self) -> None:
        """Count the training sequences for the stages that use them, at the start of the training."""
        if self.trainer.current_epoch == self._first_epoch:
            count_sequences(self.cascade, self.trainer.datamodule)

    def on_train_batch_start(self, batch: CascadeBatch, batch_idx: int) -> None:
        """Set the scheduled learning rate for the tables that are updated inside backward."""
        optimizer = self.optimizers().optimizer
        if isinstance(optimizer, DenseAndFused):
            optimizer.sync_tables()

    def on_train_epoch_end(self) -> None:
        """Raise if a check of the last step failed, or if the loss would skip every list of a short epoch."""
        self._deferred_checks.raise_failed()
        if self._check is not None:
            self._finish_check()

    def update_metrics(self, split: Split, scores: Sequence[Tensor], batch: CascadeBatch) -> dict[str, ListMean]:
        """Add a batch to the metrics of a split. Return the metrics by name, in the configured order."""
        metrics: dict[str, ListMean] = dict(self.metrics[split].items())  # type: ignore[operator]
        for metric in metrics.values():
            inputs = scores if metric.stage is None else scores[metric.stage]
            metric.update(inputs, batch.labels, batch.mask)
        return metrics

    def _metrics(self, entries: Sequence[MetricEntry]) -> nn.ModuleDict:
        quotas = dict(zip(self.cascade.names, self.cascade.quotas, strict=True))
        above, labels = self.schema.positive_above, self.schema.labels
        operator = self.loss.operator if self.objective.uses_loss else None
        return nn.ModuleDict(
            configured_metrics(entries, k=self.k, quotas=quotas, positive_above=above, labels=labels, operator=operator)
        )

    def _monitored(self, name: str | None) -> str:
        metrics: dict[str, ListMean] = dict(self.metrics["val"].items())  # type: ignore[operator]
        if not metrics:
            raise ValueError("metrics must not be empty; name at least one metric, or omit the option for the default")
        if name is None:
            return next((key for key, metric in metrics.items() if metric.whole_cascade), next(iter(metrics)))
        if name.endswith("/corpus"):
            return name
        if name not in metrics:
            raise ValueError(
                f"cannot monitor {name!r}: it is not computed; {suggest(name, metrics)}available: {', '.join(metrics)}"
            )
        if not metrics[name].higher_is_better:
            raise ValueError(f"cannot monitor {name!r}: a higher value must be better; available: {', '.join(metrics)}")
        return name

    def _check_lists(self) -> None:
        quotas = self.cascade.quotas
        # With a pool, the cuts are not compared with the lengths of lists (`check_pool`).
        cuts = self.objective.cuts(quotas, self.k) if self.objective.pool is None else []
        length = getattr(self.trainer.datamodule, "list_length", None)
        groups = len(self.schema.groups) + bool(getattr(self.trainer.datamodule, "train_negatives", 0))
        if self.objective.compares_groups and groups < 2:
            raise ValueError(
                f"the {self.objective.name!r} objective compares sample groups and needs at least 2, but the data has "
                f"{groups}; use --objective independent, or sample negatives (--data.train_negatives)"
            )
        separate = [config.name for config in self.cascade.configs if config.hard_negatives]
        if separate and not self.objective.separate_lists:
            raise ValueError(
                f"stage {separate[0]!r} sets hard_negatives, but the {self.objective.name!r} objective "
                f"trains all stages on the same lists; use --objective independent, or --model.hard_negatives"
            )
        if callable(length):
            lengths = self._list_lengths(length("train"), getattr(self.trainer.datamodule, "train_negatives", 0) or 0)
            for cut, longest in zip(cuts, lengths, strict=bool(cuts)):
                if cut >= longest:
                    raise ValueError(all_selected_message(cut, longest, quotas))
        self._check = LearningCheck(self.loss.positive_above, cuts, quotas)

    def _list_lengths(self, length: int, sampled: int) -> list[int]:
        """Return the length of the lists that each stage trains on."""
        options, lengths = self.hparams, []
        per_stage = [(config.hard_negatives, config.random_negatives) for config in self.cascade.configs]
        for hard, random in [(options["hard_negatives"], options["random_negatives"]), *per_stage[1:]]:
            if 0 < hard + random < sampled:
                length, sampled = length - sampled + hard + random, hard + random
            lengths.append(length)
        return lengths

    def _finish_check(self) -> None:
        check, self._check = self._check, None
        assert check is not None
        check.finish()

    def _evaluate(self, split: Split, batch: CascadeBatch) -> None:
        metrics = self.update_metrics(split, self(batch), batch)
        # Longer lists and frequent negatives are more difficult, so the names of test metrics include both.
        source = getattr(self.trainer.datamodule, "eval_negative_source", "uniform") if batch.sampled else "uniform"
        pool = f"/{batch.candidates.shape[1]}" if split == "test" else ""
        pool += f"-{source}" if pool and source != "uniform" else ""
        for name, metric in metrics.items():
            self.log(
                f"{split}/{name}{pool}", metric, on_epoch=True, prog_bar=name == self.monitor, batch_size=batch.size
            )


def _upgrade_descriptions(loss: Any, objective: Any) -> tuple[Any, Any]:
    """Return the descriptions of a checkpoint of version 0.1.0 in the current format."""
    upgraded = upgrade({"loss": loss, "objective": objective}, whole=True)
    return upgraded["loss"], upgraded["objective"]


def _loss(loss: RankingLoss | Mapping[str, Any] | str, schema: Schema) -> RankingLoss:
    """Return the loss, with the label options that it does not set taken from the schema."""
    if isinstance(loss, str):
        loss = losses.get(loss)
    elif isinstance(loss, Mapping):
        losses.discover()
        loss = build(loss, base=RankingLoss)
    assert isinstance(loss, RankingLoss)
    loss.set_label_defaults(kind=schema.labels, positive_above=schema.positive_above)
    return loss


def _objective(
    objective: ObjectiveFactory | Mapping[str, Any] | str | None, loss: RankingLoss, stages: int
) -> CascadeObjective:
    if objective is None:
        objective = default_objective(loss)
    if isinstance(objective, str):
        return objectives.resolve(objective)(loss, stages)
    if isinstance(objective, Mapping):
        objectives.discover()
        built: CascadeObjective = build(objective, loss, stages, base=CascadeObjective)
        return built
    return objective(loss, stages)
