"""From shards to full tensors and back, so that a checkpoint is the same file whatever wrote it."""

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

# Rows of a table that are drawn at once; part of what decides which values they get.
DRAWN_AT_ONCE = 1 << 16


def gather(tree: Any) -> Any:
    """Return nested dicts with every `ShardedTensor` as a full tensor on the CPU of process 0; {} in the others.

    A process may lack keys: with table-wise sharding it lists the optimizer state of its own tables only.
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
    """Return what is not sharded, and the shards of this process with their place."""
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
    """Load full tensors into a module with sharded tables; each process takes its part."""
    own = module.state_dict()
    wrong = sorted(set(own) ^ set(saved)) if strict else []
    wrong += [key for key, value in own.items() if key in saved and tuple(value.size()) != tuple(saved[key].shape)]
    if wrong:
        raise ValueError(
            f"the checkpoint's weights do not fit this model; give the options it was trained with. The first that "
            f"does not fit: {wrong[0]}"
        )
    for key, value in own.items():
        if key in saved:
            copy_into(value, saved[key])


def draw_tables(module: nn.Module, configs: Mapping[str, Sequence[Any]]) -> None:
    """Initialise sharded tables that were built on the meta device, a part of a table at a time.

    The values depend on torch's seed, the table and the row, not on who holds it: they are the same for every number of
    processes and every kind of sharding. No process holds more than its shards and `DRAWN_AT_ONCE` rows.

    Args:
        module: Holds the tables.
        configs: TorchRec's description of the tables of each collection, by its path.
    """
    for path, collection in table_collections(module).items():
        state = collection.state_dict()
        for config in configs[path]:
            target = state[f"embedding_bags.{config.name}.weight"]
            key = zlib.crc32(f"{path}.{config.name}".encode())
            for shard in target.local_shards():
                rows, columns = place_of(shard)
                for part in range(rows.start // DRAWN_AT_ONCE, -(-rows.stop // DRAWN_AT_ONCE)):
                    first = part * DRAWN_AT_ONCE
                    drawn = _draw(config, min(DRAWN_AT_ONCE, config.num_embeddings - first), (key, part))
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
