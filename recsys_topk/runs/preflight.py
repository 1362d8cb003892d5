"""Checks of a run before its data are prepared, its tables are allocated and its directory is created."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback

from recsys_topk.cascades.memory import check_memory, plan_memory
from recsys_topk.cascades.module import CascadeModule
from recsys_topk.cascades.stage import StageConfig
from recsys_topk.datamodules import Schema
from recsys_topk.machine import machine_memory
from recsys_topk.registry import suggest
from recsys_topk.runs.checkpoint import check_is_file
from recsys_topk.runs.directory import check_name
from recsys_topk.text import size_text, table

NO_GPU = "--trainer.accelerator needs a GPU, but no GPU is visible; use --trainer.accelerator cpu (or auto)"
_QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def check_options(options: Namespace) -> None:
    """Raise if options contradict each other, or name a directory or a checkpoint that cannot be used."""
    if options.log_checkpoints and options.logger != "wandb":
        raise ValueError("--log_checkpoints uploads to W&B; add --logger wandb")
    if options.name is not None:
        check_name(options.name)
    if options.ckpt_path is not None:
        check_is_file(options.ckpt_path)


def check_hardware(trainer: Mapping[str, Any]) -> None:
    """Raise if this machine does not have the accelerator, devices or precision that the options of a trainer name."""
    given = {name: trainer.get(name) for name in ("accelerator", "devices", "precision")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if not all(isinstance(value, (str, int, list)) for value in chosen.values()):
        return  # an object of Lightning's, which the trainer checks
    try:
        pl.Trainer(**chosen, **_QUIET)
    except (MisconfigurationException, TypeError, ValueError) as error:
        no_gpu = "gpu backend" in str(error) or "CUDAAccelerator" in str(error)
        raise ValueError(NO_GPU if no_gpu else str(error)) from error


def check_monitors(callbacks: Sequence[Callback], model: CascadeModule) -> None:
    """Raise if a callback, such as `EarlyStopping`, monitors a validation metric that is not measured."""
    measured = [f"val/{name}" for name in {model.monitor: None, **dict(model.metrics["val"].items())}]  # type: ignore[operator]
    for callback in callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and name.startswith("val/") and name not in measured:
            raise ValueError(
                f"{type(callback).__name__} monitors {name!r}, which is not measured; "
                f"{suggest(name, measured)}available: {', '.join(measured)}"
            )


_SMALL: Final = 256 * 2**20
"""Tables with a smaller total size are reported in one line."""


def announce_memory(
    schema: Schema, stages: int | Sequence[StageConfig], options: Mapping[str, Any], accelerator: str, strategy: Any
) -> list[str]:
    """Return the memory of the cascade as lines; raise if the device has less. Sharded tables are not checked."""
    taken = inspect.signature(plan_memory).parameters
    arguments = {"stages": stages, **{name: value for name, value in options.items() if name in taken}}
    available = None if "torchrec" in str(strategy).lower() else _available(accelerator)
    plan = plan_memory(schema, **arguments) if available is None else check_memory(schema, available, arguments)
    others = f"; other layers: {size_text(plan.layers + plan.training)}" if plan.layers else ""
    others += f"; counts: {size_text(plan.counts)}" if plan.counts > 2**20 else ""
    if plan.total < _SMALL:
        parts = ", ".join(f"{size_text(plan.part(name))} {name}" for name in ("weights", "optimizer", "gradient"))
        return [f"tables of {plan.copies} {'stage' if plan.copies == 1 else 'stages'}: {parts}{others}"]
    lines = [f"  {line}" for line in table(plan.lines()).splitlines()]
    return [f"tables, before they are allocated{others}:", *lines]


def _available(accelerator: str) -> int | None:
    """Return the memory of the training device in bytes; None = unknown."""
    import torch

    if accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return machine_memory()
