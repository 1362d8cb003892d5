"""Memory and time estimates of sharded tables: TorchRec's planner on tables on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recsys_topk.cascades.optimizers import fused_optimizer, table_collections
from recsys_topk.strategies.sharding import Sharding, allowed_kinds, plan_tables

# If the tables do not fit, up to this many times the requested number of devices are tried.
MAX_FACTOR = 64


@dataclass(frozen=True)
class ShardedTables:
    """A plan for all tables."""

    tables: tuple[dict[str, object], ...]  # one row per table, largest first: memory of its shards, estimated time, ...
    weights: int  # bytes of all weights
    per_device: tuple[int, ...]  # bytes of all tables on each device, with optimizer state and buffers
    slowest: float  # estimated milliseconds per step on the slowest device, for the tables only


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
    options = sorted(planner._best_plan or (), key=lambda option: -option.tensor.numel())
    # Bytes and milliseconds by table and device.
    memory_of, time_of = np.zeros((len(options), devices), dtype=np.int64), np.zeros((len(options), devices))
    for number, option in enumerate(options):
        for shard in option.shards:
            memory_of[number, shard.rank] += shard.storage.hbm + shard.storage.ddr
            time_of[number, shard.rank] += shard.perf.total
    rows = tuple(
        {
            "table": _short(f"{option.path.replace('/', '.')}.{option.name}"),
            "rows": f"{option.tensor.shape[0]:,}",
            "dim": option.tensor.shape[1],
            "sharding": option.sharding_type,
            "shards": len(option.shards),
            "GB per device": f"{own.max() / 1e9:,.2f}",
            "est. ms": f"{times.max():,.3f}",
        }
        for option, own, times in zip(options, memory_of, time_of, strict=True)
    )
    weights = 4 * sum(option.tensor.numel() for option in options)
    return ShardedTables(rows, weights, tuple(memory_of.sum(0).tolist()), float(time_of.sum(0).max()))


def _short(path: str) -> str:
    return path.removeprefix("cascade.stages.").replace(".embedding.collections", "").removeprefix("tables.")
