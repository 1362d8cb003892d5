"""The cascade as described in the papers: the baseline of `bench step`, never used for training.

It has one embedding look-up per slot of each list, applies DIN's perceptron to a (B N, L, 2 D) concatenation, and
applies the item tower to every candidate. It computes the same function as the stages of `recsys_topk.cascades`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn

from recsys_topk.cascades.cascade import Cascade
from recsys_topk.cascades.layers import MLP
from recsys_topk.cascades.stage import Stage
from recsys_topk.cascades.stages.din import DIN
from recsys_topk.cascades.stages.two_tower import TwoTower
from recsys_topk.datamodules import CascadeBatch, Schema


class TextbookStage(nn.Module):
    """A two-tower or DIN stage in textbook form, with the weights of a given stage."""

    def __init__(self, stage: Stage, schema: Schema) -> None:
        super().__init__()
        if not isinstance(stage, (DIN, TwoTower)):
            raise ValueError(f"no textbook form of {type(stage).__name__}")
        self.schema = schema
        self.groups = stage.embedding.groups
        state = stage.embedding.state_dict()
        weights = {key.split(".")[-2]: value for key, value in state.items() if key.endswith(".weight")}
        self.tables = nn.ModuleDict()
        for table in schema.tables:
            embedding = nn.Embedding(table.rows, weights[table.name].shape[1], padding_idx=table.padding)
            with torch.no_grad():
                embedding.weight.copy_(weights[table.name])
                embedding.weight[table.padding] = 0.0
            self.tables[table.name] = embedding
        self.parts = nn.ModuleDict(
            {name: _sequential(part) for name, part in stage.named_children() if isinstance(part, MLP)}
        )
        self.is_din = isinstance(stage, DIN)

    def embed(self, kind: str, ids: Tensor) -> Tensor:
        """Look up every feature of every row."""
        column = {feature.table: i for i, feature in enumerate(getattr(self.schema, kind))}
        order = [table.name for kinds, tables in self.groups.items() if kind in kinds for table in tables]
        return torch.cat([self.tables[name](ids[..., column[name]]) for name in order], dim=-1)

    def forward(self, batch: CascadeBatch) -> Tensor:
        """Return the scores, (B, N)."""
        request = self.embed("request", batch.request)
        item = self.embed("items", batch.items[batch.candidates])
        history = self.embed("history", batch.history)
        size, items = batch.candidates.shape
        if not self.is_din:
            mean = history.sum(1) / batch.history_length.clamp_min(1)[:, None]
            users = self.parts["user_tower"](torch.cat([request, mean], -1))
            scores: Tensor = (self.parts["item_tower"](item) * users[:, None]).sum(-1)
            return scores
        length, width = history.shape[1:]
        views = history.repeat_interleave(items, dim=0)
        query = item[..., :width].reshape(-1, 1, width).expand(-1, length, -1)
        logits = self.parts["attention"](torch.cat([views, query], -1)).squeeze(-1)
        real = batch.history_mask.repeat_interleave(items, dim=0)
        weights = torch.where(real, logits, -1e30).softmax(-1)
        interest = torch.bmm(weights[:, None], views).view(size, items, width)
        inputs = torch.cat([request[:, None].expand(-1, items, -1), interest, item], -1)
        ranked: Tensor = self.parts["mlp"](inputs).squeeze(-1)
        return ranked


class Textbook(nn.ModuleList):
    """The stages of a cascade in textbook form, with the same weights."""

    def __init__(self, cascade: Cascade, schema: Schema) -> None:
        super().__init__(TextbookStage(cast("Stage", stage), schema) for stage in cascade.stages.values())

    def forward(self, batch: CascadeBatch) -> list[Tensor]:
        """Return the scores of every stage, each (B, N)."""
        return [stage(batch) for stage in self]


def _sequential(mlp: MLP) -> nn.Sequential:
    layers = (mlp.first, *mlp.tail)
    return nn.Sequential(*(nn.ReLU() if isinstance(layer, nn.ReLU) else deepcopy(layer) for layer in layers))
