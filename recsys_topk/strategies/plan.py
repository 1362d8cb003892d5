"""Memory and time estimates of sharded tables: TorchRec's planner on tables on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recsys_topk.cascades.optimizers import fused_optimizer, table_collections
from recsys_topk.cascades.tables import configs_of
from recsys_topk.strategies.sharding import Sharding, allowed_kinds, plan_tables

# If the tables do not fit, up to this many times the requested number of devices are tried.
MAX_FACTOR = 64


@dataclass(frozen=True)
class TablePlan:
    """The sharding of one table."""

    table: str  # path of the table
    rows: int
    dim: int  # number of columns
    sharding: str  # the kind of sharding, e.g. "row_wise"
    shards: int  # number of shards
    bytes: int  # largest memory of its shards on one device, including optimizer state and buffers
    seconds: float  # TorchRec's estimate of the time per step for look-ups, updates and communication on one device


@dataclass(frozen=True)
class ShardedTables:
    """A plan for all tables."""

    tables: tuple[TablePlan, ...]  # the plans of the tables, largest table first
    weights: int  # bytes of all weights
    per_device: tuple[int, ...]  # bytes of all tables on each device
    slowest: float  # estimated seconds per step on the slowest device, for the tables only


def one_table(items: int, dim: int, optimizer: str) -> nn.Module:
    """Return a module with one table on the meta device, updated by an optimizer as in `embedding_optimizer`."""
    config = EmbeddingBagConfig(name="item", num_embeddings=items, embedding_dim=dim, feature_names=["item"])
    module = nn.Module()
    module.tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    _apply_optimizer(optimizer, list(module.parameters()))
    return module


def without_memory(module: nn.Module, optimizer: str) -> nn.Module:
    """Return only the tables of a cascade that was built inside `tables_on_meta`."""
    made = nn.ModuleDict({path.replace(".", "/"): collection for path, collection in table_collections(module).items()})
    _apply_optimizer(optimizer, list(made.parameters()))
    return made


def _apply_optimizer(optimizer: str, parameters: list[nn.Parameter]) -> None:
    fused = fused_optimizer(optimizer, 0.1)
    if fused is None:
        raise ValueError(
            f"sharded tables need an optimizer that runs inside backward, got embedding_optimizer {optimizer!r}; use "
            f"rowwise_adagrad, adagrad or sgd"
        )
    apply_optimizer_in_backward(fused.optimizer, parameters, dict(fused.options))


def plan(
    tables: nn.Module,
    devices: int,
    device: str,
    memory: int | None,
    *,
    optimizer: str = "rowwise_adagrad",
    sharding: Sharding = "auto",
    batch_size: int = 1024,
) -> ShardedTables:
    """Return TorchRec's plan. If the tables do not fit, raise a ValueError with the number of devices that is enough.

    `memory` is that of one device in bytes (None = TorchRec's default). `batch_size` requests per device are for the
    time estimates.
    """
    kinds = allowed_kinds(sharding, fused_optimizer(optimizer, 0.1))
    try:
        return _plan(tables, kinds, devices, device, memory, batch_size)
    except ValueError as error:
        number = devices
        while number < MAX_FACTOR * devices:
            number *= 2
            try:
                found = _plan(tables, kinds, number, device, memory, batch_size)
            except ValueError:
                continue
            most = max(found.per_device)
            raise ValueError(f"{error}. {number} devices are enough, with {most / 1e9:,.1f} GB each") from None
        raise ValueError(f"{error}. Even {number} devices are not enough") from None


def _plan(
    tables: nn.Module, kinds: list[str], devices: int, device: str, memory: int | None, batch_size: int
) -> ShardedTables:
    _, planner = plan_tables(tables, kinds, devices, device, memory, batch_size)
    options: Sequence[Any] = planner._best_plan or ()
    per_device, seconds = [0] * devices, [0.0] * devices
    made = []
    for option in options:
        own, times = [0] * devices, [0.0] * devices
        for shard in option.shards:
            own[shard.rank] += shard.storage.hbm + shard.storage.ddr
            times[shard.rank] += shard.perf.total / 1e3  # TorchRec uses milliseconds
        rows, dim = option.tensor.shape
        made.append(
            TablePlan(
                f"{option.path.replace('/', '.')}.{option.name}", rows, dim, option.sharding_type,
                len(option.shards), max(own), max(times),
            )
        )  # fmt: skip
        per_device = [a + b for a, b in zip(per_device, own, strict=True)]
        seconds = [a + b for a, b in zip(seconds, times, strict=True)]
    made.sort(key=lambda table: -table.rows * table.dim)
    collections = [part for part in tables.modules() if isinstance(part, EmbeddingBagCollection)]
    configs = [config for collection in collections for config in configs_of(collection)]
    weights = sum(config.num_embeddings * config.embedding_dim * 4 for config in configs)
    return ShardedTables(tuple(made), weights, tuple(per_device), max(seconds))
