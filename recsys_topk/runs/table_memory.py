"""The memory of the embedding tables, checked before they are allocated."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from recsys_topk.cascades.memory import check_memory, machine_memory, plan_memory
from recsys_topk.datamodules import Schema
from recsys_topk.text import size_text, table

_SMALL: Final = 256 * 2**20
"""Tables with a smaller total size are reported in one line."""


def announce_memory(
    schema: Schema, stages: int, options: Mapping[str, Any], accelerator: str, strategy: Any
) -> list[str]:
    """Return the memory of the tables as lines; raise if the device has less. Sharded tables are not checked."""
    taken = inspect.signature(plan_memory).parameters
    arguments = {"stages": stages, **{name: value for name, value in options.items() if name in taken}}
    available = None if "torchrec" in str(strategy).lower() else _available(accelerator)
    plan = plan_memory(schema, **arguments) if available is None else check_memory(schema, available, arguments)
    if plan.total < _SMALL:
        parts = ", ".join(f"{size_text(plan.part(name))} {name}" for name in ("weights", "optimizer", "gradient"))
        return [f"tables of {plan.copies} stages: {parts}"]
    return ["tables, before they are allocated:", *(f"  {line}" for line in table(plan.lines()).splitlines())]


def _available(accelerator: str) -> int | None:
    """Return the memory of the training device in bytes; None = unknown."""
    import torch

    if accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return machine_memory()
