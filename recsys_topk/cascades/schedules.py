"""Learning-rate schedules of torch, selected by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from recsys_topk.cascades.optimizers import warm_up
from recsys_topk.registry import suggest
from recsys_topk.trust import HARMLESS

NAMES = HARMLESS["torch.optim.lr_scheduler"]
HOME = "torch.optim.lr_scheduler"
# Arguments for the length of the whole schedule. The default is the length of the training.
LENGTHS = ("T_max", "total_steps", "total_iters")
# Options that are not arguments of the class of the schedule.
OWN = ("interval", "monitor")


def describe_schedule(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a schedule as ``{"class_path": ..., "init_args": ...}``. Raise on an unknown name or option.

    Args:
        given: A name, e.g. ``"CosineAnnealingLR"``, or a mapping with the name as `class_path` and options in
            `init_args` or at the top level. Options that are strings are parsed as YAML.

    Example:
        >>> describe_schedule({"class_path": "StepLR", "step_size": "100"})
        {'class_path': 'torch.optim.lr_scheduler.StepLR', 'init_args': {'step_size': 100}}
    """
    parts: dict[str, Any] = {"class_path": given} if isinstance(given, str) else dict(given)
    path, options = str(parts.pop("class_path", "")), {**(parts.pop("init_args", None) or {}), **parts}
    home, _, name = path.rpartition(".")
    if name not in NAMES or home not in ("", HOME):
        raise ValueError(f"unknown lr_scheduler {path!r}; {suggest(name, NAMES)}available: {', '.join(NAMES)}")
    accepted = inspect.signature(getattr(lr_scheduler, name)).parameters
    known = [option for option in accepted if option not in ("optimizer", "last_epoch", "verbose")] + list(OWN)
    for option in options:
        if option not in known:
            close = suggest(option, known, "--lr_scheduler.{}")
            raise ValueError(
                f"{name} has no option {option!r} (--lr_scheduler.{option}); {close}it has: {', '.join(known)}"
            )
    read = {key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in options.items()}
    if read.get("interval", "step") not in ("step", "epoch"):
        raise ValueError(f"--lr_scheduler.interval must be step or epoch, got {read['interval']!r}")
    return {"class_path": f"{HOME}.{name}", "init_args": read}


def make_schedule(
    optimizer: Optimizer,
    described: Mapping[str, Any],
    *,
    warmup_steps: int,
    length: Callable[[str], int],
    monitor: str,
) -> dict[str, Any]:
    """Return a schedule in the format of `configure_optimizers` in Lightning.

    The schedule starts after the warm-up. It also applies to tables with a fused optimizer.

    Args:
        optimizer: The optimizer.
        described: The schedule, from `describe_schedule`. Its option `interval` is ``"step"`` (the default) or
            ``"epoch"``; `monitor` is the metric of `ReduceLROnPlateau`, which is stepped per epoch.
        warmup_steps: Number of steps in which the learning rate rises; 0 = no warm-up.
        length: A function of ``"step"`` or ``"epoch"`` that returns the number of steps or epochs of the training, for
            schedules without an explicit length.
        monitor: The default metric; a higher value is better.
    """
    cls: type[LRScheduler] = getattr(lr_scheduler, described["class_path"].rpartition(".")[2])
    options = dict(described["init_args"])
    plateau = issubclass(cls, ReduceLROnPlateau)
    interval = options.pop("interval", "epoch" if plateau else "step")
    watched = options.pop("monitor", None)
    if plateau and watched is None:
        options.setdefault("mode", "max")
    if warmup_steps and (plateau or interval == "epoch"):
        raise ValueError(
            f"warmup_steps={warmup_steps} counts steps, but {cls.__name__} is stepped per epoch; "
            f"use --lr_scheduler.interval step with another schedule, or --model.warmup_steps 0"
        )
    accepted = inspect.signature(cls).parameters
    for name in LENGTHS:
        if name in accepted and not {name, "epochs", "steps_per_epoch"} & set(options):
            options[name] = max(1, length(interval) - warmup_steps)
    try:
        scheduler = cls(optimizer, **options)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"--lr_scheduler {cls.__name__}: {error}") from error
    if warmup_steps:
        scheduler = SequentialLR(optimizer, [warm_up(optimizer, warmup_steps), scheduler], milestones=[warmup_steps])
    return {"scheduler": scheduler, "interval": interval, "monitor": watched or monitor}
