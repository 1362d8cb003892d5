"""What sharded tables will take, before a machine is rented: TorchRec's planner on tables without memory."""

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

# Beyond this many times the devices that were asked about, no more are tried.
FARTHEST = 64


@dataclass(frozen=True)
class TablePlan:
    """How one table is divided.

    Attributes:
        table: Its path.
        rows: Its rows.
        dim: Its columns.
        sharding: The kind, e.g. ``"row_wise"``.
        shards: Number of shards.
        bytes: Memory of its shards on the device that has the most of it, optimizer state and buffers included.
        seconds: TorchRec's estimate of a step's look-ups, updates and communication on that device.
    """

    table: str
    rows: int
    dim: int
    sharding: str
    shards: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ShardedTables:
    """A plan for all tables.

    Attributes:
        tables: The largest first.
        weights: Bytes of all weights.
        per_device: Bytes of each device, of all tables.
        slowest: Estimated seconds of a step on the slowest device, tables only.
    """

    tables: tuple[TablePlan, ...]
    weights: int
    per_device: tuple[int, ...]
    slowest: float


def one_table(items: int, dim: int, optimizer: str) -> nn.Module:
    """Return a module with one table on the meta device.

    Args:
        items: Its rows.
        dim: Its columns.
        optimizer: As `embedding_optimizer` of a cascade.
    """
    config = EmbeddingBagConfig(name="item", num_embeddings=items, embedding_dim=dim, feature_names=["item"])
    module = nn.Module()
    module.tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    _give(optimizer, list(module.parameters()))
    return module


def without_memory(module: nn.Module, optimizer: str) -> nn.Module:
    """Return the tables of a cascade that was built inside `tables_on_meta`, and nothing else of it."""
    made = nn.ModuleDict({path.replace(".", "/"): collection for path, collection in table_collections(module).items()})
    _give(optimizer, list(made.parameters()))
    return made


def _give(optimizer: str, parameters: list[nn.Parameter]) -> None:
    fused = fused_optimizer(optimizer, 0.1)
    if fused is None:
        raise ValueError(
            "sharded tables need an optimizer inside backward: embedding_optimizer rowwise_adagrad, adagrad or sgd"
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
    """Return TorchRec's plan; raise ValueError with what would fit if there is none.

    Args:
        tables: A module with tables on the meta device.
        devices: Number of devices, one process each.
        device: ``"cpu"`` or ``"cuda"``.
        memory: Bytes of one device; None = TorchRec's default.
        optimizer: Optimizer of the tables.
        sharding: Which kinds may be chosen.
        batch_size: Requests per device and batch, for the estimates of time.
    """
    kinds = allowed_kinds(sharding, fused_optimizer(optimizer, 0.1))
    try:
        return _plan(tables, kinds, devices, device, memory, batch_size)
    except ValueError as error:
        number = devices
        while number < FARTHEST * devices:
            number *= 2
            try:
                found = _plan(tables, kinds, number, device, memory, batch_size)
            except ValueError:
                continue
            most = max(found.per_device)
            raise ValueError(f"{error}. {number} devices would do, with {most / 1e9:,.1f} GB each") from None
        raise ValueError(f"{error}. Not even {number} devices would do") from None


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
            times[shard.rank] += shard.perf.total / 1e3  # in milliseconds there
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
