"""Longer tables for a checkpoint: new rows for the ids that a growing vocabulary has admitted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recsys_topk.cascades.optimizers import dense_parameters, inner_optimizer, table_collections
from recsys_topk.cascades.tables import is_fused, is_plain
from recsys_topk.types import Array

_TABLE = re.compile(r"(?:.*\.embedding_bags\.)?(?:history:)?([^.]+)\.weight")
_UNKNOWN = 1


def grow_tables(content: Mapping[str, Any], model: nn.Module, new_rows: Mapping[str, Array]) -> None:
    """Add the new rows of the model to the tables of a checkpoint, in the weights and in the state of the optimizer.

    A new row starts as a copy of the row of unknown ids, and its optimizer state at 0. All other rows stay bit-equal.

    Args:
        content: The checkpoint, changed in place.
        model: The model with the longer tables.
        new_rows: The rows of each table that have a new id, by table name; some may have held another id before.
    """
    collections = table_collections(model)
    if not all(is_plain(collection) or is_fused(collection) for collection in collections.values()):
        raise ValueError(
            "a growing vocabulary needs tables on one device, but these are sharded; use --trainer.strategy auto, or "
            "--data.vocabulary hash:rows=N for sharded tables"
        )
    model_state = model.state_dict()

    def grown(name: str, tensor: Tensor, rows: int, start: bool) -> Tensor:
        match = _TABLE.fullmatch(name)
        if match is None or match[1] not in new_rows or not tensor.dim() or len(tensor) > rows:
            return tensor
        rows_of_new_ids = torch.from_numpy(new_rows[match[1]])
        longer = torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
        longer[rows_of_new_ids] = longer[_UNKNOWN].clone() if start else 0.0
        return longer

    lengths = {name: len(tensor) if tensor.dim() else 0 for name, tensor in model_state.items()}
    weights = content["state_dict"]
    for name, tensor in weights.items():
        weights[name] = grown(name, tensor, lengths.get(name, 0), start=True)
    fused = {path for path, collection in collections.items() if inner_optimizer(collection) is not None}
    for optimizer in content["optimizer_states"]:
        names = list(dense_parameters(model, fused))
        for number, state in optimizer.get("dense", optimizer)["state"].items():
            for key, value in state.items():
                # Scalars such as the number of steps belong to the whole tensor.
                state[key] = grown(names[number], value, lengths[names[number]], start=False)
        for path, fused_state in optimizer.get("fused", {}).items():
            for table, state in fused_state["state"].items():
                rows = lengths[f"{path}.embedding_bags.{table}"]
                fused_state["state"][table] = {
                    key: grown(table, value, rows, start=False) for key, value in state.items()
                }
