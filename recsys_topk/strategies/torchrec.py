"""`--trainer.strategy torchrec`: embedding tables are sharded over processes, all other parameters are replicated."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.types import ShardedModule, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.optimizers import table_collections
from recsys_topk.cascades.shards import ENTRY, copy_into, load_into, load_stored, save_shards, split
from recsys_topk.cascades.tables import configs_of
from recsys_topk.datamodules.base import CascadeDataModule
from recsys_topk.datamodules.batch import CascadeBatch
from recsys_topk.strategies.full_tensors import draw_tables, gather
from recsys_topk.strategies.sharding import Sharder, Sharding, allowed_kinds, bytes_of, plan_tables, quiet_planner


class TorchRecStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is untyped here
    """Lightning strategy for tables that are too large for one process: TorchRec shards them, DDP trains the rest.

    Training is equivalent to training in one process on the whole batch. Tables need an optimizer that updates them
    inside backward (``embedding_optimizer`` sgd, adagrad or rowwise_adagrad). Checkpoints have the same names as
    without sharding and can be loaded with any strategy and any number of processes. Those of large tables have a
    folder beside them, into which each process writes its own shards.

    The backend is Gloo on CPUs and NCCL on CUDA devices. NCCL was not tested.

    Args:
        sharding: ``"auto"`` (TorchRec's planner chooses for each table), ``"table_wise"`` (one process holds the whole
            table), ``"row_wise"`` (each process holds a part of the rows) or ``"column_wise"`` (a part of the columns).
        memory: Memory for the tables of one process, e.g. ``"80GB"``. The planner fails if the tables do not fit. None
            = TorchRec's default.
        tables_on_meta: Build tables on the meta device; each process initialises its own part. The values then depend
            on the seed but not on the number of processes. They differ from those of a run without this option.
        timeout_minutes: Minutes after which a process stops waiting for another one.
        single_file: Up to this size of the tables, without optimizer state, process 0 gathers full tensors and writes
            a checkpoint as one file.

    Example::

        trainer = Trainer(accelerator="cpu", devices=2, strategy=TorchRecStrategy(sharding="row_wise"))
    """

    strategy_name = "torchrec"

    def __init__(
        self,
        sharding: Sharding = "auto",
        memory: str | None = None,
        tables_on_meta: bool = False,
        timeout_minutes: float = 30.0,
        single_file: str = "100MB",
    ) -> None:
        super().__init__(timeout=timedelta(minutes=timeout_minutes))
        allowed_kinds(sharding, None)
        self.sharding: Sharding = sharding
        self.memory = None if memory is None else bytes_of(memory)
        self.tables_on_meta = tables_on_meta
        self.single_file = bytes_of(single_file)
        self.plan: ShardingPlan | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy as ``torchrec``."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=str(cls.__doc__).splitlines()[0])

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded after the tables are sharded."""
        return True

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the tables, wrap the other parameters, and build the optimizer."""
        module = self.lightning_module
        if not table_collections(module):  # numeric features only: plain data parallelism
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.precision_plugin.convert_module(module)
        self.model = self._shard(module, fitting)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: pl.LightningModule, fitting: bool) -> nn.Module:
        embeddings = [part for part in module.modules() if isinstance(part, FeatureEmbedding)]
        if any(isinstance(part, ShardedModule) for part in table_collections(module).values()):  # already sharded
            return self._wrap(module, ShardingPlan({}))
        fused = [embedding.defuse() for embedding in embeddings]
        if fitting and None in fused:
            raise ValueError(
                "--trainer.strategy torchrec needs tables that are updated inside backward, got embedding_optimizer "
                "'same'; use --model.embedding_optimizer rowwise_adagrad (or adagrad, sgd), or --trainer.strategy ddp, "
                "which copies the tables to each process"
            )
        configs = {path: configs_of(tables) for path, tables in table_collections(module).items()}
        uneven = {one.name: one.embedding_dim for own in configs.values() for one in own if one.embedding_dim % 4}
        if uneven:
            raise ValueError(
                f"sharded tables need a dimension that is a multiple of 4, got {uneven}; change --model.dim"
            )
        kinds = allowed_kinds(self.sharding, fused[0])
        rows = self._rows_per_batch()
        module_plan, _ = plan_tables(
            module, kinds, self.world_size, self.root_device.type, self.memory, rows, dist.group.WORLD
        )
        for embedding, own in zip(embeddings, fused, strict=True):
            if fitting and own is not None:
                options = dict(own.options)  # a copy, because TorchRec modifies it
                apply_optimizer_in_backward(own.optimizer, embedding.collections.parameters(), options)
        before = {name: value for name, value in module.state_dict().items() if value.device.type != "meta"}
        wrapped = self._wrap(module, module_plan)
        for name, value in module.state_dict().items():  # TorchRec initialised the tables again
            if name in before and isinstance(value, ShardedTensor):
                copy_into(value, before[name])
        if len(before) < len(module.state_dict()):
            draw_tables(module, configs)
        agree = AgreedRows(self.root_device)
        for embedding in embeddings:
            embedding.agree = agree
        self.plan = module_plan
        return wrapped

    def _wrap(self, module: pl.LightningModule, plan: ShardingPlan) -> nn.Module:
        with quiet_planner():
            made: nn.Module = DistributedModelParallel(
                module,
                device=self.root_device,
                plan=plan,
                sharders=[Sharder()],
                data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
            )
        return made

    def _rows_per_batch(self) -> int:
        data = getattr(self.lightning_module.trainer, "datamodule", None)
        return data.rows_per_batch() if isinstance(data, CascadeDataModule) else 1024

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write small tables as full tensors into one file, and large ones as shards of each process beside it."""
        rest, shards = split(checkpoint)
        tables = sum(value.size().numel() * value.dtype.itemsize for path, value in shards.items() if len(path) == 2)
        if not self.reduce_boolean_decision(tables > self.single_file, all=False) or "://" in str(filepath):
            rest = gather(checkpoint)
        else:
            name = self.broadcast(f"shards-{secrets.token_hex(4)}")
            rest[ENTRY] = save_shards(shards, Path(filepath).parent / name)
        super().save_checkpoint(rest, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint without the tables: each process reads its own shards later."""
        if "://" in str(checkpoint_path):
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        return load_stored(checkpoint_path, weights_only is not False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights. Each process loads its own shards of the tables."""
        load_into(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load an optimizer state that any number of processes saved. Each process loads its own shards."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Release the resources of training. Sharded tables stay in place, so the model can still be evaluated."""
        if isinstance(self.model, DistributedDataParallel):
            super().teardown()
            return
        self.model = self.lightning_module
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class AgreedRows:
    """The largest numbers of requests, pool items and history views over all processes, with one all-reduce per batch.

    Sharded tables need the same number of bags from every process; missing bags are filled with empty ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[CascadeBatch, tuple[int, int, int]] | None = None

    def __call__(self, batch: CascadeBatch) -> tuple[int, int, int]:
        """Return the three numbers. Every process must call it for its part of the same batch."""
        if self._last is None or self._last[0] is not batch:
            views = batch.history.shape[0] * batch.history.shape[1]
            own: Tensor = torch.tensor([batch.size, len(batch.items), views], device=self._device)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            requests, items, longest = own.tolist()
            self._last = (batch, (requests, items, longest))
        return self._last[1]
