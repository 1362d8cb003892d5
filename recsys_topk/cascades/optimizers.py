"""Optimizers and schedules by name: ordinary optimizers, and those that update embedding tables inside backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recsys_topk.cascades.features import FeatureEmbedding
from recsys_topk.cascades.shards import copy_into
from recsys_topk.cascades.tables import FUSED, FusedOptimizer
from recsys_topk.registry import suggest

OptimizerName = Literal["adam", "adamw", "adagrad", "sgd"]
EmbeddingOptimizerName = Literal["same", "rowwise_adagrad", "adagrad", "sgd"]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def fused_optimizer(name: str, lr: float) -> FusedOptimizer | None:
    """Return the fused optimizer of the embedding tables, or None if the ordinary optimizer updates them.

    Args:
        name: ``"same"``, or one of `FUSED`.
        lr: Learning rate.
    """
    if name == "same":
        return None
    if name not in FUSED:
        raise _unknown("embedding optimizer", name, ("same", *FUSED))
    return FusedOptimizer(FUSED[name], {"lr": lr} if name == "sgd" else {"lr": lr, "eps": 1e-10})


def table_collections(module: nn.Module) -> dict[str, nn.Module]:
    """Return all collections of embedding tables of a module, by path; those of every `FeatureEmbedding`."""
    return {
        f"{path}.collections.{name}" if path else f"collections.{name}": collection
        for path, part in module.named_modules()
        if isinstance(part, FeatureEmbedding)
        for name, collection in part.collections.items()
    }


def inner_optimizer(collection: nn.Module) -> Any:
    """Return the optimizer that updates tables inside backward, or None if an ordinary optimizer updates them.

    In TorchRec it is a method of unsharded collections and a property of sharded ones.
    """
    optimizer = getattr(collection, "fused_optimizer", None)
    return optimizer() if callable(optimizer) else optimizer


def dense_parameters(module: nn.Module, fused: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the parameters of the ordinary optimizer by name, in its order. `fused`: paths of `table_collections`."""
    collections = table_collections(module)
    inside = {id(parameter) for path in fused for parameter in collections[path].parameters()}
    return {
        path: parameter
        for path, parameter in module.named_parameters()
        if id(parameter) not in inside and not hasattr(parameter, "_in_backward_optimizers")
    }


def make_optimizer(name: str, module: nn.Module, lr: float, options: Mapping[str, Any]) -> Optimizer:
    """Build the optimizer of a module. Tables that are updated inside backward keep their fused optimizer.

    The ordinary optimizers use their fused kernels, which take one pass over the parameters. If there are tables with
    a fused optimizer, both kinds are combined into one optimizer, so that schedules also set the learning rate of the
    tables and checkpoints hold their state. Parameters to which `apply_optimizer_in_backward` was applied are left
    out.

    Args:
        name: One of `OPTIMIZERS`.
        module: The module to optimise.
        lr: Learning rate.
        options: Further arguments of the class, e.g. ``eps``.
    """
    if name not in OPTIMIZERS:
        raise _unknown("optimizer", name, tuple(OPTIMIZERS))
    collections = table_collections(module)
    inner = {path: inner_optimizer(collection) for path, collection in collections.items()}
    inner = {path: optimizer for path, optimizer in inner.items() if optimizer is not None}
    dense = dense_parameters(module, inner)

    def build(parameters: Any) -> Optimizer:
        try:
            return OPTIMIZERS[name](parameters, lr=lr, fused=True, **options)
        except TypeError as error:
            raise ValueError(f"optimizer {name!r} does not take these options: {error}") from error

    if not inner:
        return build(list(dense.values()))
    embeddings = {path: part for path, part in module.named_modules() if isinstance(part, FeatureEmbedding)}
    rates = {path: embeddings[path.rpartition(".collections.")[0]].rate for path in inner}
    return DenseAndFused(build(list(dense.values())), dense, inner, rates)


class DenseAndFused(CombinedOptimizer):  # type: ignore[misc]  # torchrec is untyped here
    """One ordinary optimizer for the dense parameters, and the fused optimizers of the tables.

    TorchRec's `CombinedOptimizer` cannot load state before the first step, when Adam has no state yet. This class
    calls the loading method of each part.

    Args:
        dense: The ordinary optimizer.
        parameters: Its parameters, by name.
        fused: The optimizers of the table collections, by the collection's path.
        rates: Their learning rates. A process without a table of a sharded collection cannot read the rate from its
            optimizer.
    """

    def __init__(
        self,
        dense: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        fused: Mapping[str, Any],
        rates: Mapping[str, float],
    ) -> None:
        self._dense, self._fused = dense, dict(fused)
        # One group per collection, also if this process holds only a part of its tables. Schedules and their saved
        # state are therefore the same in every process and for every number of processes.
        self._tables: list[dict[str, Any]] = [{"params": [], "lr": rates[path]} for path in self._fused]
        super().__init__([("dense", KeyedOptimizerWrapper(dict(parameters), lambda _: dense)), *self._fused.items()])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the dense parameters, then one group with the learning rate per collection of tables."""
        return [*self._dense.param_groups, *self._tables]

    def sync_tables(self) -> None:
        """Set the learning rate of the tables to that of the schedule. Otherwise it would be one step late."""
        for part, group in zip(self._fused.values(), self._tables, strict=True):
            for fused_group in part.param_groups:
                fused_group["lr"] = group["lr"]
            part.step()  # only sets the learning rate: the rows are updated inside backward

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both parts; the state of sharded tables as `ShardedTensor`s of this process."""
        tables = {
            path: {"state": _named(part.state_dict()["state"]), "lr": group["lr"]}
            for (path, part), group in zip(self._fused.items(), self._tables, strict=True)
        }
        return {"dense": self._dense.state_dict(), "fused": tables}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of both parts. The state of the tables is copied in place."""
        if set(state_dict.get("fused", ())) != set(self._fused):
            raise ValueError(
                "the checkpoint was trained with another embedding_optimizer than this run; use the same one to resume"
            )
        groups = self._dense.param_groups  # schedules hold references to these dicts, and loading would replace them
        self._dense.load_state_dict(dict(state_dict["dense"]))
        for group, loaded in zip(groups, self._dense.param_groups, strict=True):
            group.update(loaded)
        self._dense.param_groups = groups
        for (path, part), group in zip(self._fused.items(), self._tables, strict=True):
            saved = state_dict["fused"][path]
            for key, values in _named(part.state_dict()["state"]).items():
                for name, tensor in values.items():
                    copy_into(tensor, saved["state"][key][name])
            group["lr"] = saved["lr"]
        self.sync_tables()


def _named(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state of tables with the names of unsharded ones.

    TorchRec names it ``{"T.weight": {"T.weight.momentum_1": ...}}`` for an unsharded table T, and
    ``{"embedding_bags.T.weight": {"T.momentum1": ...}}`` for a sharded one.
    """
    named: dict[str, dict[str, Any]] = {}
    for key, values in state.items():
        table = key.removeprefix("embedding_bags.").removesuffix(".weight")
        parts = {name.removeprefix(f"{table}.").removeprefix("weight."): value for name, value in values.items()}
        named[f"{table}.weight"] = {
            f"{table}.weight.{re.sub(r'^momentum(?=[0-9])', 'momentum_', name)}": value for name, value in parts.items()
        }
    return named


def warm_up(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Return a schedule that raises the learning rate linearly over the first `steps` steps."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(steps, 1)))


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> ValueError:
    return ValueError(f"unknown {kind} {name!r}; {suggest(name, known)}available: {', '.join(known)}")
