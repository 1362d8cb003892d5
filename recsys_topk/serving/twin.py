"""Copies of stages for export, with plain embedding look-ups instead of TorchRec and compiled loops."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recsys_topk.cascades.features import Embedded, FeatureEmbedding, HistoryForm
from recsys_topk.cascades.stage import Stage
from recsys_topk.cascades.tables import table_weights
from recsys_topk.datamodules.batch import NO_VALUES, CascadeBatch
from recsys_topk.serving.manifest import FIELDS, Input, inputs_of
from recsys_topk.tabular.schema import PARTS, Part, Schema


class PlainEmbedding(nn.Module):
    """`FeatureEmbedding` with one embedding look-up per feature. For export, not for training.

    The weights are shared, not copied. The output of parts that are not embedded is empty, and their tables are not
    included.
    """

    def __init__(self, embedding: FeatureEmbedding, parts: tuple[Part, ...] = PARTS) -> None:
        super().__init__()
        self.layout = embedding.layout
        self.dims = embedding.dims
        self.shared_dim = embedding.shared_dim
        self.parts = parts
        read = {use.table.name for part in parts for use in self.layout.uses[part]}
        self.tables = nn.ParameterDict(
            {
                name: nn.Parameter(weight.detach(), requires_grad=False)
                for collection in embedding.collections.values()
                for name, weight in table_weights(collection).items()
                if name in read
            }
        )

    def forward(self, batch: CascadeBatch, history: HistoryForm = "rows") -> Embedded:
        """Return the result of `FeatureEmbedding.forward`."""
        found = {part: self._embed(part, batch) if part in self.parts else torch.zeros(0, 0) for part in PARTS}
        if history == "mean" and "history" in self.parts:
            # Padding has embeddings and values of 0, so it does not change the sum.
            found["history"] = found["history"].sum(1) / batch.history_length.clamp_min(1)[:, None]
        ages = batch.history_values[..., -1] if self.layout.has_ages and "history" in self.parts else None
        return Embedded(**found, ages=ages)

    def _embed(self, part: Part, batch: CascadeBatch) -> Tensor:
        ids, values = (getattr(batch, field) for field in FIELDS[part])
        found = []
        for use in self.layout.uses[part]:
            own = ids[..., use.columns]
            present = (own != use.table.padding).float()
            rows = F.embedding(own, self.tables[use.table.name]).float() * present[..., None]
            if use.bag:
                rows = rows.sum(-2) / present.sum(-1, keepdim=True).clamp_min(1.0)
            found.append(rows if use.bag else rows.squeeze(-2))
        if self.layout.values[part]:
            found.append(values[..., : self.layout.values[part]])
        return torch.cat(found, dim=-1) if found else torch.zeros(*ids.shape[:-1], 0)


def plain_twin(stage: Stage, parts: tuple[Part, ...] = PARTS) -> Any:
    """Return a copy of a stage in evaluation mode, with a `PlainEmbedding` that shares the weights of the tables."""
    # The tables may be large, so they are not copied.
    embeddings = {name: part for name, part in stage.named_children() if isinstance(part, FeatureEmbedding)}
    twin: Any = copy.deepcopy(stage, {id(part): nn.Identity() for part in embeddings.values()})
    for name, part in embeddings.items():
        setattr(twin, name, PlainEmbedding(part, parts))
    return twin.eval().requires_grad_(False)


class ExportedModel(nn.Module, ABC):
    """Base class of exported models: a function of `inputs`, in order; `output` has the name and axes of the output."""

    inputs: list[Input]
    output: tuple[str, tuple[str | int, ...]]

    def __init__(self, schema: Schema, parts: tuple[Part, ...], lists: bool = False) -> None:
        super().__init__()
        self.inputs = inputs_of(schema, parts, lists)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the output for the tensors of `inputs`."""
        return self.compute({one.name: tensor for one, tensor in zip(self.inputs, tensors, strict=True)})

    @abstractmethod
    def compute(self, given: dict[str, Tensor]) -> Tensor:
        """Return the output for the inputs by name."""


class ListScores(ExportedModel):
    """Scores (batch, items) of any stage. Every candidate is a separate pool item."""

    output = ("scores", ("batch", "items"))

    def __init__(self, stage: Stage, schema: Schema) -> None:
        super().__init__(schema, PARTS, lists=True)
        self.stage = plain_twin(stage)

    def compute(self, given: dict[str, Tensor]) -> Tensor:
        """See `ExportedModel.compute`."""
        size, number = next(given[name] for name in FIELDS["items"] if name in given).shape[:2]
        flat = {name: given[name].flatten(0, 1) for name in FIELDS["items"] if name in given}
        scores: Tensor = self.stage.score(_batch({**given, **flat}, size, number))
        return scores


class RequestVectors(ExportedModel):
    """Request vectors (batch, D) of a stage with towers."""

    def __init__(self, stage: Any, schema: Schema) -> None:
        super().__init__(schema, ("request", "history"))
        self.stage = plain_twin(stage, ("request", "history"))
        self.output = ("vectors", ("batch", self.stage.width))
        self.stage.item_tower = None

    def compute(self, given: dict[str, Tensor]) -> Tensor:
        """See `ExportedModel.compute`."""
        batch = _batch(given, next(iter(given.values())).shape[0], 0)
        vectors: Tensor = self.stage.encode_requests(self.stage.embed(batch))
        return vectors


class ItemVectors(ExportedModel):
    """Item vectors (items, D) of a stage with towers."""

    def __init__(self, stage: Any, schema: Schema) -> None:
        super().__init__(schema, ("items",))
        self.stage = plain_twin(stage, ("items",))
        self.output = ("vectors", ("items", self.stage.width))
        self.stage.user_tower = self.stage.encoder = self.stage.recency = None

    def compute(self, given: dict[str, Tensor]) -> Tensor:
        """See `ExportedModel.compute`."""
        # Each row is a list of one item, because the item tower reads rows of the pool.
        batch = _batch(given, next(iter(given.values())).shape[0], 1)
        vectors: Tensor = self.stage.encode_items(self.stage.embed(batch))
        return vectors


def _batch(given: dict[str, Tensor], size: Any, number: Any) -> CascadeBatch:
    """Return a batch of `size` lists of `number` items each. The lists share no items."""
    shape = (size, number)
    no_ids = torch.zeros(size, 0, dtype=torch.int64)
    return CascadeBatch(
        request_id=torch.zeros(size, dtype=torch.int64),
        request=given.get("request", no_ids),
        history=given.get("history", no_ids[:, None]),
        history_length=given.get("history_length", torch.zeros(size, dtype=torch.int64)),
        item_id=torch.arange(size * number),
        items=given.get("items", torch.zeros(size * number, 0, dtype=torch.int64)),
        candidates=torch.arange(size * number).view(shape),
        labels=torch.zeros(shape),
        mask=torch.ones(shape, dtype=torch.bool),
        group=torch.zeros(shape, dtype=torch.int64),
        request_values=given.get("request_values", NO_VALUES),
        history_values=given.get("history_values", NO_VALUES),
        item_values=given.get("item_values", NO_VALUES),
    )
