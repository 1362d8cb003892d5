"""Sharding of embedding tables over processes with TorchRec's planner."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_topk.cascades.tables import FusedOptimizer, configs_of

Sharding = Literal["auto", "table_wise", "row_wise", "column_wise"]

KINDS = ("table_wise", "row_wise", "column_wise")
# The smallest number of columns per shard that fbgemm's kernels support.
MIN_WIDTH = 4
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # torchrec is untyped here
    """TorchRec's sharder with row-wise sharding also on a CPU, where it works but is not offered by TorchRec."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the kinds that the planner may choose from. Data-parallel tables are not among them."""
        return list(KINDS)


def allowed_kinds(sharding: Sharding, fused: FusedOptimizer | None) -> list[str]:
    """Return the kinds of sharding that the planner may choose from. Raise if there is none."""
    if sharding not in get_args(Sharding):
        raise ValueError(f"sharding must be one of {', '.join(get_args(Sharding))}, got {sharding!r}")
    by_row = fused is not None and fused.optimizer is RowWiseAdagrad
    if by_row and sharding == "column_wise":
        raise ValueError(
            "column_wise sharding splits rows, but rowwise_adagrad has one learning rate per row, so parts of a row "
            "would get different rates; use row_wise or table_wise sharding, or --model.embedding_optimizer adagrad"
        )
    return [kind for kind in KINDS if kind != "column_wise" or not by_row] if sharding == "auto" else [sharding]


def plan_tables(
    module: nn.Module,
    kinds: list[str],
    processes: int,
    device: str,
    memory: int | None = None,
    rows: int = 1024,
    group: Any = None,
) -> tuple[ShardingPlan, EmbeddingShardingPlanner]:
    """Return a plan for all collections of tables in a module, and the planner.

    `memory` has the bytes for the tables of one process (None = TorchRec's default), `rows` the bags per batch and
    process, for the estimates. The processes of `group` need the same plan; without it this process plans alone.
    """
    configs = [
        config for part in module.modules() if type(part) is EmbeddingBagCollection for config in configs_of(part)
    ]
    constraints = {
        config.name: ParameterConstraints(
            sharding_types=kinds,
            compute_kernels=["fused"],  # tables in the memory of the device
            min_partition=_partition(config.embedding_dim, processes) if kinds == ["column_wise"] else None,
            pooling_factors=[1.0] * len(config.feature_names),
        )
        for config in configs
    }
    capacity = {} if memory is None else {"hbm_cap" if device == "cuda" else "ddr_cap": memory}
    with quiet_planner():
        topology = Topology(world_size=processes, compute_device=device, created_by_factory=True, **capacity)
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=max(1, rows))
        try:
            if group is None:
                return planner.plan(module, [Sharder()]), planner
            return planner.collective_plan(module, [Sharder()], group), planner
        except PlannerError as error:
            wanted = sum(config.num_embeddings * config.embedding_dim * 4 for config in configs)
            raise ValueError(
                f"the tables ({wanted / 1e9:,.2f} GB of weights) do not fit: {processes} processes on {device}, "
                f"sharding {' or '.join(kinds)}, "
                f"{'TorchRec default memory' if memory is None else f'{memory / 1e9:,.2f} GB each'}; use more "
                f"processes, more memory, row_wise sharding, a smaller dimension, or hash ids into fewer rows"
            ) from error


def _partition(dim: int, processes: int) -> int:
    """Return the width of column shards: the widest one that splits the table, or the whole table."""
    parts = [part for part in range(MIN_WIDTH, dim, MIN_WIDTH) if dim % part == 0 and dim // part >= min(processes, 2)]
    return max(parts, default=dim)


def bytes_of(text: str | float) -> int:
    """Return the number of bytes of a size with a unit.

    Example:
        >>> bytes_of("80GB"), bytes_of("1.5GiB"), bytes_of(1000)
        (80000000000, 1610612736, 1000)
    """
    found = re.fullmatch(r"\s*([0-9.eE+]+)\s*([A-Za-z]*)\s*", str(text))
    try:
        number = float(found[1]) if found else None
    except ValueError:
        number = None
    if found is None or number is None or found[2].upper() not in UNITS or number <= 0:
        raise ValueError(f"memory must be a number with a unit such as 80GB or 512MiB, got {text!r}")
    return int(number * UNITS[found[2].upper()])


@contextmanager
def quiet_planner() -> Iterator[None]:
    """Suppress the log messages and warnings of TorchRec's planner. Errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # some messages go to the root logger
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
