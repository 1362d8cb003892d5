"""Full tensors of shards, for checkpoints in one file; and the initial values of tables on the meta device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_topk.cascades.optimizers import table_collections
from recsys_topk.cascades.shards import Keys, place_of, put, split

# Number of table rows that are initialised at once. Changing it changes the initial values.
ROWS_AT_ONCE = 1 << 16


def gather(tree: Any) -> Any:
    """Return nested dicts with every `ShardedTensor` as a full CPU tensor in process 0, and {} in the other processes.

    A process may lack keys: with table-wise sharding it has only the optimizer state of its own tables.
    """
    rest, sharded = split(tree)
    shards = [
        (path, tuple(value.size()), place_of(one), one.tensor.detach().cpu())
        for path, value in sharded.items()
        for one in value.local_shards()
    ]
    received: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(shards, received if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() != 0:
        return {}
    full: dict[Keys, Tensor] = {}
    for path, size, where, values in (shard for part in received for shard in part):
        if path not in full:
            full[path] = torch.zeros(size, dtype=values.dtype)
            put(rest, path, full[path])
        full[path][where] = values.view(full[path][where].shape)
    return rest


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
