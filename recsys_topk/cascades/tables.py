"""Collections of embedding tables: plain or with a fused optimizer, on any device, read by bags of ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_topk.cascades.layout import Use
from recsys_topk.ops.stages.row_update import RowUpdate, Rule
from recsys_topk.tabular.schema import Table

_on_meta = False

FUSED: dict[Rule, type[torch.optim.Optimizer]] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer that updates the tables row by row inside backward, without a gradient of the size of the table.

    Attributes:
        optimizer: Class that selects the optimizer of fbgemm: SGD, Adagrad or RowWiseAdagrad (no fused Adam on CPU).
        options: Its arguments, e.g. ``lr`` and ``eps``.
    """

    optimizer: type[torch.optim.Optimizer]
    options: Mapping[str, float]


@dataclass(frozen=True)
class Bags:
    """The ids of one feature in bags, with one output row per bag.

    Attributes:
        ids: (ids of all bags,) int64.
        lengths: (bags,) int64, the number of ids of each bag.
        weights: (ids of all bags,), the weight of each id in the sum; None = 1.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None


def make_bags(ids: Tensor, use: Use | None, weighted: bool, static: bool) -> Bags:
    """Return the bags of one feature, one bag per row of ids.

    Args:
        ids: The ids of a part, (rows, columns), or (rows, L, columns) for the sum over L views.
        use: The feature; None = the part does not have the feature, and its bags are empty.
        weighted: Return weights: 1 for an id, 1 / number of real ids in a bag feature, 0 for padding.
        static: Keep padding in the bags, so that their lengths do not depend on the ids; requires weights.
    """
    if use is None:
        none = ids.new_empty(0, dtype=torch.float32) if weighted else None
        return Bags(ids.new_empty(0), ids.new_zeros(len(ids)), none)
    feature_ids = ids[..., use.columns]
    present = feature_ids != use.table.padding
    weights = present.float() if weighted else None
    if weights is not None and use.bag:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1.0)
    if static or bool(present.all()):  # no padding, or padding is kept: no ids have to be removed
        assert weights is not None or not static
        lengths = ids.new_full((len(feature_ids),), feature_ids.shape[1:].numel())
        return Bags(feature_ids.flatten(), lengths, None if weights is None else weights.flatten())
    return Bags(feature_ids[present], present.flatten(1).sum(1), None if weights is None else weights[present])


def join_bags(bags: list[Bags]) -> Bags:
    """Return the concatenated bags of several parts."""
    weights = [bag.weights for bag in bags if bag.weights is not None]
    return Bags(
        torch.cat([bag.ids for bag in bags]),
        torch.cat([bag.lengths for bag in bags]),
        torch.cat(weights) if weights else None,
    )


def pad_bags(bags: Bags, number: int) -> Bags:
    """Append empty bags, so that there are `number` bags."""
    return Bags(bags.ids, F.pad(bags.lengths, (0, number - len(bags.lengths))), bags.weights)


@contextmanager
def tables_on_meta(active: bool = True) -> Iterator[None]:
    """Build tables on the meta device inside this context. They take no memory until a strategy places its shards."""
    global _on_meta
    before, _on_meta = _on_meta, active
    try:
        yield
    finally:
        _on_meta = before


def place_of_tables(device: torch.device) -> torch.device:
    """Return the device on which to build tables for `device`."""
    return torch.device("meta") if _on_meta else device


def table_config(table: Table, dim: int, features: Sequence[str], init_std: float) -> Any:
    """Return TorchRec's config of a table that `features` read."""
    return EmbeddingBagConfig(
        name=table.name,
        embedding_dim=dim,
        num_embeddings=table.rows,
        feature_names=list(features),
        pooling=PoolingType.SUM,
        init_fn=partial(torch.nn.init.normal_, std=init_std),
    )


def plain_collection(configs: Sequence[Any], device: torch.device, weighted: bool) -> nn.Module:
    """Return tables that an ordinary optimizer updates. They are initialised, except on the meta device."""
    collection: nn.Module = EmbeddingBagCollection(tables=list(configs), device=device, is_weighted=weighted)
    return collection


def fused_collection(configs: Sequence[Any], device: torch.device, weighted: bool, fused: FusedOptimizer) -> nn.Module:
    """Return initialised tables that are updated inside backward."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"tables with an optimizer inside backward can be on a CPU or a CUDA device, got {str(device)!r}; "
            f"use embedding_optimizer 'same' there"
        )
    uneven = {config.name: config.embedding_dim for config in configs if config.embedding_dim % 4}
    if uneven:
        raise ValueError(
            f"tables with an optimizer inside backward need a dimension that is a multiple of 4, got {uneven}; "
            f"change the dimension, or use embedding_optimizer 'same'"
        )
    collection: nn.Module = FusedEmbeddingBagCollection(
        tables=list(configs),
        optimizer_type=fused.optimizer,
        optimizer_kwargs=dict(fused.options),
        is_weighted=weighted,
        device=device,
    )
    initialise(collection)  # replaces the default initialisation of the fused collection
    return collection


def initialise(collection: nn.Module) -> None:
    """Initialise the weights of a collection again."""
    weights = table_weights(collection)
    with torch.no_grad():
        for config in configs_of(collection):
            config.init_fn(weights[config.name])


def configs_of(collection: nn.Module) -> list[Any]:
    """Return TorchRec's configs of the tables of a collection."""
    return list(collection.embedding_bag_configs())  # type: ignore[operator]


def table_weights(collection: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of an unsharded collection by table name; fused ones share the memory of the kernel."""
    bags: Any = collection.embedding_bags
    return {name: bag.weight for name, bag in bags.items()}


def is_plain(collection: nn.Module) -> bool:
    """Return whether an ordinary optimizer updates the tables, and they are not sharded."""
    return type(collection) is EmbeddingBagCollection


def is_fused(collection: nn.Module) -> bool:
    """Return whether the tables are updated inside backward, and are not sharded."""
    return type(collection) is FusedEmbeddingBagCollection


def readable(collection: nn.Module) -> bool:
    """Return whether the weights can be read directly: plain tables, and fused tables outside training.

    Sharded tables cannot be read directly. A fused table in training needs its own forward pass, or updates by
    `row_updates`.
    """
    return is_plain(collection) or (is_fused(collection) and not torch.is_grad_enabled())


def row_updates(collection: nn.Module) -> dict[str, RowUpdate | None] | None:
    """Return how code that reads the weights directly must update each table inside backward, in table order.

    The value of a table is None if an ordinary optimizer updates it, or if it is not trained. The state belongs to the
    optimizer of the collection, which saves it and receives the learning rate. Return None if the weights cannot be
    read: for sharded tables, and for an optimizer without an update rule here.
    """
    names = list(table_weights(collection)) if is_plain(collection) or is_fused(collection) else []
    if not names or readable(collection):
        return dict.fromkeys(names) if names else None
    fused: Any = collection
    inner, options = fused.fused_optimizer(), fused.optimizer_kwargs()
    state = inner.state_dict()["state"]
    for rule, kind in FUSED.items():
        if kind is fused.optimizer_type():
            return {
                name: RowUpdate(
                    rule,
                    lambda: inner.param_groups[0]["lr"],
                    options.get("eps", 0.0),
                    state.get(f"{name}.weight", {}).get(f"{name}.weight.momentum_1"),
                )
                for name in names
            }
    return None


def read_weights(collection: nn.Module, keys: Mapping[str, Bags]) -> Tensor:
    """Return the concatenated pooled embeddings of all keys, (bags, width), read directly from the weights."""
    table_of = {name: config.name for config in configs_of(collection) for name in config.feature_names}
    weights = table_weights(collection)
    pooled = []
    for key, bags in keys.items():
        weight = weights[table_of[key]]
        offsets = F.pad(bags.lengths.cumsum(0), (1, 0))
        scale = None if bags.weights is None else bags.weights.to(weight.dtype)
        pooled.append(
            F.embedding_bag(bags.ids, weight, offsets, mode="sum", include_last_offset=True, per_sample_weights=scale)
        )
    return torch.cat(pooled, dim=1) if len(pooled) > 1 else pooled[0]


def read_torchrec(collection: nn.Module, keys: Mapping[str, Bags]) -> Tensor:
    """Return the concatenated pooled embeddings of all keys, (bags, width), by the collection's forward pass."""
    bags, names = list(keys.values()), list(keys)
    weights = [bag.weights for bag in bags if bag.weights is not None]
    keyed = collection(
        KeyedJaggedTensor(
            keys=names,
            values=torch.cat([bag.ids for bag in bags]),
            lengths=torch.cat([bag.lengths for bag in bags]).to(torch.int32),
            weights=torch.cat(weights) if weights else None,
            stride=len(bags[0].lengths),
            length_per_key=[len(bag.ids) for bag in bags],  # avoids a synchronisation with the device in TorchRec
        )
    )
    # Unsharded output has the order of the keys and needs no copy. Sharded output is selected by name.
    values: Tensor = keyed.values() if list(keyed.keys()) == names else KeyedTensor.regroup([keyed], [names])[0]
    return values
