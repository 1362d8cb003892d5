"""Checks that the processes of a run belong together: the same options in all, and a free port to meet at."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Final

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from recsys_topk.runs.config import flatten_config
from recsys_topk.runs.directory import first_process
from recsys_topk.runs.lost_process import LostProcessError

# Options of one machine: where files are, and what is reported.
OWN: Final = ("out", "name", "wandb", "logger", "data.cache_dir", "trainer.callbacks", "trainer.default_root_dir")


class SameOptions(Callback):  # type: ignore[misc]  # lightning is untyped here
    """Raises before the first step if a process has other options, or data of another schema, than process 0.

    Args:
        options: All options of the run, with defaults.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        flat = flatten_config(options)
        self.options = {key: repr(value) for key, value in flat.items() if not key.startswith(OWN)}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare a hash of the options; if it differs, exchange the options to name the first difference."""
        if trainer.world_size == 1:
            return
        options = {**self.options, "the schema of the data": json.dumps(pl_module.schema.to_dict(), sort_keys=True)}
        own = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
        if trainer.strategy.reduce_boolean_decision(trainer.strategy.broadcast(own) == own, all=True):
            return
        every: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(every, options)
        dist.destroy_process_group()  # left to the interpreter's end, it would wait for its own threads
        rank = next(rank for rank, other in enumerate(every) if other != every[0])
        first, other = every[0], every[rank]
        key = next(key for key in {**first, **other} if first.get(key) != other.get(key))
        raise LostProcessError(
            f"process {rank} of {trainer.world_size} has other options than process 0: {key} is "
            f"{other.get(key)!s:.200}, and {first.get(key)!s:.200} in process 0; start all with the same options",
            quiet=not first_process(),
        )


def check_port(processes: int) -> None:
    """Raise if the port at which the processes of a run will meet is in use. torchrun has opened it itself."""
    port, by_torchrun = os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if processes == 1 or port is None or by_torchrun or not first_process() or dist.is_initialized():
        return
    try:
        with socket.socket() as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(("", int(port)))
            found.listen()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the processes cannot meet at port {port}, which MASTER_PORT names ({error}); set it to a free port"
        ) from error
