"""Conversion between shards and full tensors, so that checkpoints do not depend on the strategy."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recsys_topk.cascades.optimizers import table_collections
from recsys_topk.cascades.tables import copy_into, place_of

# Number of table rows that are initialised at once. Changing it changes the initial values.
ROWS_AT_ONCE = 1 << 16


def gather(tree: Any) -> Any:
    """Return nested dicts with every `ShardedTensor` as a full CPU tensor in process 0, and {} in the other processes.

    A process may lack keys: with table-wise sharding it has only the optimizer state of its own tables.
    """
    if not isinstance(tree, Mapping):
        return tree
    rest, shards = _split(tree)
    received: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(shards, received if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() != 0:
        return {}
    full: dict[tuple[str, ...], Tensor] = {}
    for path, size, where, values in (shard for part in received for shard in part):
        if path not in full:
            full[path] = torch.zeros(size, dtype=values.dtype)
        full[path][where] = values.view(full[path][where].shape)
    for path, tensor in full.items():
        holder = rest
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = tensor
    return rest


def _split(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> tuple[dict[str, Any], list[Any]]:
    """Return the values that are not sharded, and the shards of this process with their positions."""
    rest: dict[str, Any] = {}
    shards: list[Any] = []
    for key, value in tree.items():
        if isinstance(value, ShardedTensor):
            found = value.local_shards()
            shards += [((*path, key), tuple(value.size()), place_of(one), one.tensor.detach().cpu()) for one in found]
        elif isinstance(value, Mapping):
            rest[key], inner = _split(value, (*path, key))
            shards += inner
        else:
            rest[key] = value
    return rest, shards


def load_into(module: nn.Module, saved: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load full tensors into a module with sharded tables. Each process loads its own shards."""
    own = module.state_dict()
    wrong = sorted(set(own) ^ set(saved)) if strict else []
    wrong += [key for key, value in own.items() if key in saved and tuple(value.size()) != tuple(saved[key].shape)]
    if wrong:
        raise ValueError(
            f"the weights of the checkpoint do not match this model (first mismatch: {wrong[0]}); use the options that "
            f"it was trained with"
        )
    for key, value in own.items():
        if key in saved:
            copy_into(value, saved[key])


def draw_tables(module: nn.Module, configs: Mapping[str, Sequence[Any]]) -> None:
    """Initialise sharded tables that were built on the meta device, `ROWS_AT_ONCE` rows at a time.

    The values depend on torch's seed, the table and the row. They are the same for every number of processes and every
    kind of sharding. A process needs memory for its shards and `ROWS_AT_ONCE` rows only. TorchRec's table configs are
    given by the path of their collection.
    """
    for path, collection in table_collections(module).items():
        state = collection.state_dict()
        for config in configs[path]:
            target = state[f"embedding_bags.{config.name}.weight"]
            key = zlib.crc32(f"{path}.{config.name}".encode())
            for shard in target.local_shards():
                rows, columns = place_of(shard)
                for part in range(rows.start // ROWS_AT_ONCE, -(-rows.stop // ROWS_AT_ONCE)):
                    first = part * ROWS_AT_ONCE
                    drawn = _draw(config, min(ROWS_AT_ONCE, config.num_embeddings - first), (key, part))
                    begin, end = max(first, rows.start), min(first + len(drawn), rows.stop)
                    with torch.no_grad():
                        shard.tensor[begin - rows.start : end - rows.start].copy_(
                            drawn[begin - first : end - first, columns]
                        )


def _draw(config: Any, rows: int, key: tuple[int, int]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((torch.initial_seed() * 1_000_003 + key[0] * 65_537 + key[1]) % (1 << 63))
        values = torch.empty(rows, config.embedding_dim)
        config.init_fn(values)
    return values
